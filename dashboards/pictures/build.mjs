// Bundles the page that draws the panels; the result goes to www/, which is not checked in.
import { copyFile, mkdir } from 'node:fs/promises';
import { build } from 'esbuild';

const here = new URL('.', import.meta.url).pathname;

await mkdir(`${here}www`, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: ['src/page.jsx'],
  outfile: 'www/page.js',
  bundle: true,
  format: 'iife',
  platform: 'browser',
  mainFields: ['browser', 'module', 'main'],
  jsx: 'automatic',
  minify: true,
  logLevel: 'error',
  define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
  loader: { '.svg': 'dataurl', '.png': 'dataurl', '.woff': 'dataurl', '.woff2': 'dataurl', '.ttf': 'dataurl', '.wasm': 'file' },
  // No panel edits code; the editor would be most of the bundle.
  alias: { 'monaco-editor': './src/empty.js', 'react-monaco-editor': './src/empty.js' },
});
await copyFile(`${here}src/index.html`, `${here}www/index.html`);
