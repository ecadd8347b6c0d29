// The kinds of panels that the dashboards use, each drawn by Grafana's own component where there is one.
import { getFieldDisplayName, getFieldDisplayValues, getDisplayValueAlignmentFactors } from '@grafana/data';
import { BarGauge, BigValue, TimeSeries, VizRepeater } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { Timeline } from './timeline.jsx';

function values(panel, frames, theme, replaceVariables) {
  return getFieldDisplayValues({
    fieldConfig: panel.fieldConfig,
    reduceOptions: panel.options.reduceOptions,
    replaceVariables,
    theme,
    data: frames,
    timeZone: 'utc',
  });
}

function Stat({ panel, frames, theme, width, height, replaceVariables }) {
  const { options } = panel;
  return (
    <VizRepeater
      getValues={() => values(panel, frames, theme, replaceVariables)}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      orientation={options.orientation ?? 'auto'}
      source={frames}
      width={width}
      height={height}
      itemSpacing={3}
      autoGrid
      renderCounter={0}
      renderValue={({ value, alignmentFactors, width: w, height: h, count }) => (
        <BigValue
          value={value.display}
          count={count}
          alignmentFactors={alignmentFactors}
          colorMode={options.colorMode}
          graphMode={options.graphMode}
          justifyMode={options.justifyMode}
          textMode={options.textMode}
          text={options.text}
          theme={theme}
          width={w}
          height={h}
        />
      )}
    />
  );
}

function Bars({ panel, frames, theme, width, height, replaceVariables }) {
  const { options } = panel;
  return (
    <VizRepeater
      getValues={() => values(panel, frames, theme, replaceVariables)}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      orientation={options.orientation}
      source={frames}
      width={width}
      height={height}
      minVizHeight={16}
      maxVizHeight={300}
      itemSpacing={8}
      renderCounter={0}
      renderValue={({ value, alignmentFactors, width: w, height: h, orientation }) => (
        <BarGauge
          value={value.display}
          field={value.field}
          display={value.view?.getFieldDisplayProcessor(value.colIndex)}
          alignmentFactors={alignmentFactors}
          displayMode={options.displayMode}
          valueDisplayMode={options.valueMode}
          showUnfilled={options.showUnfilled}
          orientation={orientation}
          text={options.text}
          theme={theme}
          itemSpacing={8}
          lcdCellWidth={12}
          width={w}
          height={h}
        />
      )}
    />
  );
}

/** Draws the annotations where the chart's own plugin, which no package exports, would. */
function marking(events, theme) {
  return (config) => {
    if (!config || config.marked) return null;
    config.marked = true;
    config.addHook('draw', (u) => {
      const { ctx } = u;
      const { left, top, width, height } = u.bbox;
      ctx.save();
      for (const { time, end, color } of events) {
        const x = u.valToPos(time, 'x', true);
        if (x < left || x > left + width) continue;
        const until = Math.min(u.valToPos(end, 'x', true), left + width);
        ctx.fillStyle = ctx.strokeStyle = theme.visualization.getColorByName(color);
        ctx.globalAlpha = 0.12;
        ctx.fillRect(x, top, until - x, height);
        ctx.globalAlpha = 1;
        ctx.setLineDash([4, 4]);
        ctx.beginPath();
        ctx.moveTo(x, top);
        ctx.lineTo(x, top + height);
        ctx.stroke();
        ctx.fillRect(x - 3, top + height, Math.max(until - x, 0) + 6, 5);
      }
      ctx.restore();
    });
    return null;
  };
}

function Lines({ panel, frames, theme, width, height, range, events }) {
  return (
    <TimeSeries
      frames={frames}
      structureRev={1}
      width={width}
      height={height}
      timeRange={range}
      timeZone="utc"
      legend={panel.options.legend}
      options={panel.options}
    >
      {marking(events, theme)}
    </TimeSeries>
  );
}

function Grid({ panel, frames, width, height, range }) {
  const { options } = panel;
  const custom = panel.fieldConfig.defaults.custom ?? {};
  for (const field of frames[0].fields) {
    field.config.custom = { ...custom, ...field.config.custom };
    field.state = { ...field.state, displayName: getFieldDisplayName(field, frames[0], frames) };
  }
  return (
    <TableNG
      data={frames[0]}
      width={width}
      height={height}
      timeRange={range}
      noHeader={!options.showHeader}
      showTypeIcons={false}
      sortBy={options.sortBy}
      cellHeight={options.cellHeight}
      enableVirtualization={false}
      structureRev={1}
      fieldConfig={panel.fieldConfig}
    />
  );
}

/** A kind of panel: what draws it, and, where that is not what Grafana itself uses, a note that says so. */
export const KINDS = {
  stat: { draw: Stat },
  bargauge: { draw: Bars },
  timeseries: { draw: Lines },
  table: { draw: Grid },
  'state-timeline': { draw: Timeline, note: 'state timeline: drawn by this tool' },
};
