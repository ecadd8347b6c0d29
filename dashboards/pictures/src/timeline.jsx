// A timeline of states. Grafana's own component is in none of its packages: colours, texts and names are Grafana's,
// the drawing is not.
import { dateTimeFormat, getFieldDisplayName } from '@grafana/data';

const AXIS = 22;
const LEGEND = 24;

/** Joins equal neighbours; a sample stands until the next one, or for one step. */
function stretches(frame, step) {
  const [times, states] = frame.fields;
  const found = [];
  times.values.forEach((from, index) => {
    const value = states.values[index];
    const next = times.values[index + 1];
    const to = next !== undefined && next - from <= 1.5 * step ? next : from + step;
    const last = found.at(-1);
    if (last && last.value === value && last.to >= from) last.to = to;
    else found.push({ value, from, to });
  });
  return found;
}

function ticks(from, to, width) {
  const wanted = (to - from) / Math.max(width / 100, 2);
  const step = [60, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400].map((s) => s * 1000).find((s) => s >= wanted);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at < to; at += step) found.push(at);
  return found;
}

export function Timeline({ panel, frames, theme, width, height, range }) {
  const from = range.from.valueOf();
  const to = range.to.valueOf();
  const names = frames.map((frame) => getFieldDisplayName(frame.fields[1], frame, frames));
  const gutter = Math.min(Math.max(...names.map((name) => name.length)) * 6.6 + 14, width * 0.35);
  const room = (height - AXIS - LEGEND) / Math.max(frames.length, 1);
  const bar = room * (panel.options.rowHeight ?? 0.9);
  const x = (at) => gutter + ((Math.min(Math.max(at, from), to) - from) / (to - from)) * (width - gutter - 8);
  const seen = new Map();
  const rows = frames.map((frame, row) => {
    const states = frame.fields[1];
    return stretches(frame, frame.fields[0].config.interval).map((one) => {
      const shown = states.display(one.value);
      seen.set(shown.text, shown.color);
      return (
        <rect
          key={`${row} ${one.from}`}
          x={x(one.from)}
          y={row * room + (room - bar) / 2}
          width={Math.max(x(one.to) - x(one.from), 1)}
          height={bar}
          fill={shown.color}
          fillOpacity={(panel.fieldConfig.defaults.custom?.fillOpacity ?? 70) / 100}
        />
      );
    });
  });
  const text = { fill: theme.colors.text.secondary, fontSize: 12, fontFamily: theme.typography.fontFamily };
  let at = gutter;
  return (
    <svg width={width} height={height}>
      {ticks(from, to, width - gutter).map((tick) => (
        <g key={tick}>
          <line x1={x(tick)} x2={x(tick)} y1={0} y2={height - AXIS - LEGEND} stroke={theme.colors.border.weak} />
          <text {...text} x={x(tick)} y={height - LEGEND - 8} textAnchor="middle">
            {dateTimeFormat(tick, { timeZone: 'utc', format: 'HH:mm' })}
          </text>
        </g>
      ))}
      {rows}
      {names.map((name, row) => (
        <text {...text} key={name} x={gutter - 8} y={row * room + room / 2 + 4} textAnchor="end">
          {name}
        </text>
      ))}
      {[...seen].map(([name, color]) => {
        const left = at;
        at += 24 + name.length * 6.6;
        return (
          <g key={name}>
            <rect x={left} y={height - 13} width={14} height={4} rx={2} fill={color} />
            <text {...text} x={left + 18} y={height - 7}>
              {name}
            </text>
          </g>
        );
      })}
    </svg>
  );
}
