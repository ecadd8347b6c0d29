// Queries to a live Prometheus, and their answers as Grafana's data source gives them to panels.
import { FieldType, renderLegendFormat, toDataFrame } from '@grafana/data';
import { filled } from './variables.js';

const SCRAPE = 15;
const NICE = [1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

export async function ask(path, parameters) {
  const response = await fetch(`${path}?${new URLSearchParams(parameters)}`);
  const answer = await response.json();
  if (answer.status !== 'success') throw new Error(`${answer.error} in ${parameters.query ?? path}`);
  return answer.data;
}

/** The values of Grafana's own variables for a panel of this width. */
export function intervals(range, points, scrape = SCRAPE) {
  const seconds = (range.to - range.from) / 1000;
  const step = NICE.find((one) => one >= Math.max(seconds / points, scrape)) ?? NICE.at(-1);
  return {
    step,
    builtIn: {
      __interval: `${step}s`,
      __rate_interval: `${Math.max(step + scrape, 4 * scrape)}s`,
      __range: `${Math.round(seconds)}s`,
      __from: range.from,
      __to: range.to,
    },
  };
}

const parsed = (text) => (text === '+Inf' ? Infinity : text === '-Inf' ? -Infinity : Number(text));

/** Answers a panel's queries; gives one list of frames. */
export async function frames(panel, variables, range, width, scrape) {
  const { step, builtIn } = intervals(range, panel.maxDataPoints ?? width, scrape);
  const answers = await Promise.all(
    panel.targets.map(async (target) => {
      const query = filled(target.expr, variables, builtIn);
      const end = Math.floor(range.to / 1000);
      if (target.instant) return [target, (await ask('/api/v1/query', { query, time: end })).result];
      const start = Math.floor(range.from / 1000 / step) * step;
      const data = await ask('/api/v1/query_range', { query, start, end: Math.floor(end / step) * step, step });
      return [target, data.result];
    })
  );
  return answers.flatMap(([target, series]) =>
    target.format === 'table' ? [asTable(target, series, panel.targets.length > 1)] : series.map((one) => asSeries(target, one, step))
  );
}

function asSeries(target, { metric, value, values }, step) {
  const samples = values ?? [value];
  return toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, config: { interval: step * 1000 }, values: samples.map(([at]) => at * 1000) },
      {
        name: 'Value',
        type: FieldType.number,
        labels: metric,
        config: { displayNameFromDS: renderLegendFormat(target.legendFormat, metric) },
        values: samples.map(([, text]) => parsed(text)),
      },
    ],
  });
}

function asTable(target, series, several) {
  const labels = [...new Set(series.flatMap(({ metric }) => Object.keys(metric).sort()))];
  return toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, config: {}, values: series.map(({ value }) => value[0] * 1000) },
      ...labels.map((label) => ({
        name: label,
        type: FieldType.string,
        config: { filterable: true },
        values: series.map(({ metric }) => metric[label] ?? ''),
      })),
      {
        name: several ? `Value #${target.refId}` : 'Value',
        type: FieldType.number,
        config: {},
        values: series.map(({ value }) => parsed(value[1])),
      },
    ],
  });
}

/** The events of an annotation: consecutive points of a series are one event. */
export async function events(annotation, variables, range, scrape) {
  const { builtIn } = intervals(range, 1000, scrape);
  const step = Math.max(60, Math.ceil((range.to - range.from) / 1000 / 10000));
  const query = filled(annotation.expr, variables, builtIn);
  const { result } = await ask('/api/v1/query_range', { query, start: range.from / 1000, end: range.to / 1000, step });
  const found = [];
  for (const { metric, values } of result) {
    const times = values
      .filter(([, text]) => annotation.useValueForTime || Number(text) > 0)
      .map(([at, text]) => (annotation.useValueForTime ? Number(text) : at * 1000));
    let open = null;
    for (const time of times) {
      if (open && open.end + step * 1000 >= time) {
        open.end = time;
      } else {
        open = { time, end: time, color: annotation.iconColor, title: renderLegendFormat(annotation.titleFormat, metric) };
        found.push(open);
      }
    }
  }
  return found;
}
