// Draws dashboards against a live Prometheus:
//   node draw.mjs --prometheus http://127.0.0.1:9090 --out FOLDER [--dashboards fleet,server,gpu] [--themes light,dark]
//     [--width 1280] [--to SECONDS] [--hours 6] [--scrape 15] [--prefix NAME-] [--type png|webp] [--var [DASHBOARD:]pod=NAME]...
import { createReadStream } from 'node:fs';
import { mkdir, stat } from 'node:fs/promises';
import http from 'node:http';
import { extname, join, normalize } from 'node:path';
import { parseArgs } from 'node:util';
import puppeteer from 'puppeteer-core';

const here = new URL('.', import.meta.url).pathname;
const { values: options } = parseArgs({
  options: {
    prometheus: { type: 'string' },
    out: { type: 'string' },
    dashboards: { type: 'string', default: 'fleet,server,gpu' },
    themes: { type: 'string', default: 'light,dark' },
    width: { type: 'string', default: '1280' },
    to: { type: 'string', default: String(Math.floor(Date.now() / 1000)) },
    hours: { type: 'string', default: '6' },
    scrape: { type: 'string', default: '15' },
    type: { type: 'string', default: 'png' },
    prefix: { type: 'string', default: '' },
    chromium: { type: 'string', default: '/usr/bin/chromium' },
    var: { type: 'string', multiple: true, default: [] },
  },
});

const TYPES = { '.html': 'text/html', '.js': 'text/javascript', '.css': 'text/css', '.json': 'application/json' };

/** Serves the page, the dashboards and, under /api, Prometheus. */
async function serve() {
  const server = http.createServer(async (request, response) => {
    const { pathname } = new URL(request.url, 'http://localhost');
    if (pathname.startsWith('/api/')) {
      const answer = await fetch(options.prometheus + request.url);
      response.writeHead(answer.status, { 'Content-Type': 'application/json' });
      response.end(await answer.text());
      return;
    }
    const wanted = normalize(pathname);
    const path = wanted.startsWith('/dashboards/') ? join(here, '..', wanted.slice(11)) : join(here, 'www', wanted);
    try {
      await stat(path);
      response.writeHead(200, { 'Content-Type': TYPES[extname(path)] ?? 'application/octet-stream' });
      createReadStream(path).pipe(response);
    } catch {
      response.writeHead(404).end();
    }
  });
  await new Promise((done) => server.listen(0, '127.0.0.1', done));
  return server;
}

const server = await serve();
const browser = await puppeteer.launch({
  executablePath: options.chromium,
  args: ['--no-sandbox', '--disable-gpu', '--font-render-hinting=none'],
});
let failed = false;
try {
  await mkdir(options.out, { recursive: true });
  const to = options.to * 1000;
  for (const dashboard of options.dashboards.split(',')) {
    for (const theme of options.themes.split(',')) {
      const page = await browser.newPage();
      await page.setViewport({ width: Number(options.width), height: 900 });
      // What is so and so long ago is so at the end of the time range.
      await page.evaluateOnNewDocument((late) => {
        const now = Date.now;
        Date.now = () => now() - late;
        window.Date = class extends Date {
          constructor(...given) {
            super(...(given.length ? given : [Date.now()]));
          }
        };
      }, Date.now() - to);
      page.on('pageerror', (error) => console.log(`${dashboard}: ${error.message}`));
      if (process.env.VERBOSE) page.on('console', (line) => console.log(line.type(), line.text().slice(0, 300)));
      const asked = new URLSearchParams({ dashboard, theme, width: options.width, from: to - options.hours * 3600e3, to, scrape: options.scrape });
      for (const one of options.var) {
        const [, only, name, value] = /^(?:(\w+):)?(\w+)=(.*)$/.exec(one);
        if (!only || only === dashboard) asked.append(`var-${name}`, value);
      }
      await page.goto(`http://127.0.0.1:${server.address().port}/index.html?${asked}`);
      await page.waitForFunction("document.title === 'ready'", { timeout: 90_000 });
      const height = await page.evaluate(() => document.getElementById('board')?.scrollHeight ?? 600);
      await page.setViewport({ width: Number(options.width), height: height + 8 });
      await new Promise((done) => setTimeout(done, 1000));
      const path = join(options.out, `${options.prefix}${dashboard}-${theme}-${options.width}.${options.type}`);
      await page.screenshot({ path, type: options.type, ...(options.type === 'webp' && { quality: 82 }) });
      const problems = await page.evaluate(() => window.problems);
      failed ||= problems.length > 0;
      console.log(path, problems.length ? problems : '');
      await page.close();
    }
  }
} finally {
  await browser.close();
  server.close();
}
process.exit(failed ? 1 : 0);
