// Variables of a dashboard: their values, and texts with values put in.
import { ask } from './prometheus.js';

const PLACEHOLDER = /\$(?:\{([^}:]+)(?::([a-z]+))?\}|(\w+))/g;

const escaped = (value) => value.replace(/[\\^$*+?.()|[\]{}]/g, '\\\\$&');

/** A value as the Prometheus data source writes it into a query. */
function forQuery(variable) {
  if (variable.all) return variable.allValue ?? `(${variable.options.map(escaped).join('|')})`;
  const values = variable.values.map((value) => (variable.multi ? escaped(value) : value));
  return values.length === 1 ? values[0] : `(${values.join('|')})`;
}

/** Puts values into a text. A name that nobody knows stays as it is. */
export function filled(text, variables, builtIn = {}) {
  return text.replace(PLACEHOLDER, (whole, braced, format, plain) => {
    const name = braced ?? plain;
    if (name in builtIn) return String(builtIn[name]);
    const variable = variables[name];
    if (!variable) return whole;
    if (format === 'raw') return variable.values.join(',');
    if (format === 'queryparam') {
      return (variable.all ? ['$__all'] : variable.values).map((v) => `var-${name}=${encodeURIComponent(v)}`).join('&');
    }
    return forQuery(variable);
  });
}

/** Finds the values of all variables, in their order, since one may depend on those before it. */
export async function resolve(declared, chosen, range) {
  const known = {};
  for (const one of declared) {
    const asked = chosen.getAll(`var-${one.name}`);
    let options = (one.options ?? []).map((option) => option.value);
    if (one.type === 'query') options = await labelValues(filled(one.query, known), range);
    const current = [one.current?.value ?? []].flat();
    let values = asked.length ? asked : current.length ? current : options.slice(0, 1);
    if (one.type === 'datasource') values = ['prometheus'];
    const all = values[0] === '$__all';
    known[one.name] = {
      label: one.label ?? one.name,
      texts: Object.fromEntries((one.options ?? []).map(({ text, value }) => [value, text])),
      hidden: one.hide === 2,
      multi: Boolean(one.multi),
      allValue: one.allValue,
      all,
      options,
      values: all ? options : values,
    };
  }
  return known;
}

async function labelValues(query, range) {
  const [, selector, label] = /^label_values\((.*),\s*(\w+)\)$/.exec(query);
  return ask(`/api/v1/label/${label}/values`, { 'match[]': selector, start: range.from / 1000, end: range.to / 1000 });
}
