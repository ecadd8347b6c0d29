// Draws one dashboard, as the page's address says: ?dashboard=fleet&theme=dark&width=1280&from=MS&to=MS&var-pod=...
import { Component } from 'react';
import { createRoot } from 'react-dom/client';
import { ThemeContext, createTheme, dateTime, dateTimeFormat, setTimeZoneResolver, standardFieldConfigEditorRegistry } from '@grafana/data';
import { GlobalStyles, PanelChrome } from '@grafana/ui';
import { prepared } from './fields.js';
import { KINDS } from './panels.jsx';
import { events, frames } from './prometheus.js';
import { filled, resolve } from './variables.js';

const GAP = 8;
const ROW = 30;
const MARGIN = 16;

setTimeZoneResolver(() => 'utc');
standardFieldConfigEditorRegistry.setInit(() => []);

class Guard extends Component {
  state = {};
  static getDerivedStateFromError(error) {
    return { error };
  }
  componentDidCatch(error) {
    problem(`${this.props.of}: ${error.message}`);
  }
  render() {
    return this.state.error ? <pre style={{ color: 'red' }}>{String(this.state.error.stack).slice(0, 600)}</pre> : this.props.children;
  }
}

const problems = [];
const problem = (text) => problems.push(text);

const extent = (cells, cell) => cells * cell + (cells - 1) * GAP;

function Bar({ board, variables, range, theme, width }) {
  const box = {
    border: `1px solid ${theme.colors.border.medium}`,
    borderRadius: theme.shape.radius.default,
    padding: '4px 8px',
    fontSize: 12,
    whiteSpace: 'nowrap',
    background: theme.colors.background.primary,
  };
  const shown = Object.values(variables).filter((one) => !one.hidden);
  const said = ({ all, values, texts }) => (all ? 'All' : values.map((value) => texts[value] ?? value).join(' + '));
  const at = (ms) => dateTimeFormat(ms, { timeZone: 'utc', format: 'YYYY-MM-DD HH:mm' });
  return (
    <div style={{ width }}>
      <div style={{ display: 'flex', justifyContent: 'space-between', alignItems: 'center', marginBottom: 8 }}>
        <span style={{ fontSize: 18, fontWeight: 500 }}>{board.title}</span>
        <span style={box}>
          {at(range.from.valueOf())} to {at(range.to.valueOf())} UTC
        </span>
      </div>
      <div style={{ display: 'flex', gap: 8, flexWrap: 'wrap', marginBottom: 10 }}>
        {shown.map((one) => (
          <span key={one.label} style={{ ...box, overflow: 'hidden', textOverflow: 'ellipsis', maxWidth: 420 }}>
            <span style={{ color: theme.colors.text.secondary }}>{one.label}</span> {said(one)}
          </span>
        ))}
        <span style={{ flexGrow: 1 }} />
        {board.links.map((one) => (
          <span key={one.title} style={{ ...box, color: theme.colors.text.link }}>
            {one.title} ↗
          </span>
        ))}
      </div>
    </div>
  );
}

function Panel({ panel, data, theme, range, cell, replaceVariables, marks }) {
  const { x, y, w, h } = panel.gridPos;
  const place = { position: 'absolute', left: x * (cell + GAP), top: y * (ROW + GAP), width: extent(w, cell), height: extent(h, ROW) };
  if (panel.type === 'row') {
    return <div style={{ ...place, fontSize: 16, fontWeight: 500, lineHeight: `${ROW}px` }}>⌄ {panel.title}</div>;
  }
  const { draw: Draw, note } = KINDS[panel.type];
  return (
    <div style={place} id={`panel-${panel.id}`}>
      <Guard of={panel.title}>
        <PanelChrome title={panel.title} description={panel.description} width={place.width} height={place.height} padding="md"
          actions={note && <span style={{ fontSize: 10, fontStyle: 'italic', color: theme.colors.text.disabled }}>{note}</span>}>
          {(width, height) => (
            <Draw panel={panel} frames={data} theme={theme} width={width} height={height} range={range} events={marks} replaceVariables={replaceVariables} />
          )}
        </PanelChrome>
      </Guard>
    </div>
  );
}

async function main() {
  const asked = new URLSearchParams(window.location.search);
  const board = await (await fetch(`/dashboards/${asked.get('dashboard')}.json`)).json();
  const theme = createTheme({ colors: { mode: asked.get('theme') } });
  const total = Number(asked.get('width')) - 2 * MARGIN;
  const cell = (total - 23 * GAP) / 24;
  const scrape = Number(asked.get('scrape') ?? 15);
  const span = { from: Number(asked.get('from')), to: Number(asked.get('to')) };
  const range = { from: dateTime(span.from), to: dateTime(span.to), raw: { from: 'now-6h', to: 'now' } };
  const variables = await resolve(board.templating.list, asked, span);
  const replaceVariables = (text) => filled(text, variables);
  const drawn = await Promise.all(
    board.panels.map(async (panel) => {
      if (panel.type === 'row') return { panel };
      const answer = await frames(panel, variables, span, extent(panel.gridPos.w, cell), scrape);
      if (!answer.some((frame) => frame.length)) problem(`${panel.title}: no data`);
      return { panel, data: await prepared(panel, answer, theme, replaceVariables) };
    })
  );
  const found = (await Promise.all(board.annotations.list.map((one) => events(one, variables, span, scrape)))).flat();
  // Several items of one upgrade are one mark; Grafana lists them when the mouse is over it.
  const marks = [...new Map(found.map((one) => [`${one.time} ${one.end} ${one.color}`, one])).values()];
  const height = Math.max(...board.panels.map(({ gridPos: { y, h } }) => (y + h) * (ROW + GAP)));
  document.body.style.background = theme.colors.background.canvas;
  createRoot(document.getElementById('root')).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div id="board" style={{ width: total, padding: MARGIN, color: theme.colors.text.primary }}>
        <Bar board={board} variables={variables} range={range} theme={theme} width={total} />
        <div style={{ position: 'relative', height }}>
          {drawn.map(({ panel, data }) => (
            <Panel key={panel.id} panel={panel} data={data} theme={theme} range={range} cell={cell} replaceVariables={replaceVariables} marks={marks} />
          ))}
        </div>
      </div>
    </ThemeContext.Provider>
  );
}

main()
  .catch((error) => problem(error.stack))
  .finally(() =>
    setTimeout(() => {
      window.problems = problems;
      document.title = 'ready';
    }, 2000)
  );
