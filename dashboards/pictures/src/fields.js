// Field configuration and transformations, applied by Grafana's own code.
import {
  FieldConfigOptionsRegistry,
  applyFieldOverrides,
  standardTransformers,
  standardTransformersRegistry,
  transformDataFrame,
} from '@grafana/data';
import { firstValueFrom } from 'rxjs';

standardTransformersRegistry.setInit(() =>
  // Some are listed under an older name too.
  [...new Map(Object.values(standardTransformers).map((one) => [one.id, one])).values()].map((transformation) => ({
    id: transformation.id,
    name: transformation.name,
    transformation: async () => transformation,
  }))
);

/** Every option that the dashboards set, under the path at which panels read it. */
function registry(panel) {
  const { defaults, overrides } = panel.fieldConfig;
  const ids = new Set([
    ...Object.keys(defaults).filter((id) => id !== 'custom'),
    ...Object.keys(defaults.custom ?? {}).map((id) => `custom.${id}`),
    ...overrides.flatMap(({ properties }) => properties.map(({ id }) => id)),
  ]);
  const options = [...ids].map((id) => ({
    id,
    path: id.replace(/^custom\./, ''),
    isCustom: id.startsWith('custom.'),
    name: id,
    process: (value) => value,
    shouldApply: () => true,
    getItemsCount: (value) => (Array.isArray(value) ? value.length : 0),
  }));
  return new FieldConfigOptionsRegistry(() => options);
}

export async function prepared(panel, frames, theme, replaceVariables) {
  const transformed = await firstValueFrom(transformDataFrame(panel.transformations ?? [], frames));
  return applyFieldOverrides({
    data: transformed,
    fieldConfig: panel.fieldConfig,
    fieldConfigRegistry: registry(panel),
    replaceVariables,
    theme,
    timeZone: 'utc',
  });
}
