// Saves what is shown as one file that needs nothing else: the page without scripts, pictures of its charts, the data.

import { pictures } from './charts.js';
import { h } from './dom.js';

function styles() {
  const texts = [];
  for (const sheet of document.styleSheets) {
    if (!sheet.href) continue; // The charting library's own: its charts become pictures.
    texts.push([...sheet.cssRules].map((rule) => rule.cssText).join('\n'));
  }
  return texts.join('\n');
}

export async function saveAsPage(main, name, title, data) {
  const charts = await pictures(main);
  const copy = main.cloneNode(true);
  copy.removeAttribute('aria-busy');
  for (const chart of copy.querySelectorAll('.chart')) {
    const picture = charts.get(chart.id);
    if (picture) chart.replaceChildren(h('img', { src: picture, alt: chart.getAttribute('aria-label') }));
    else chart.remove();
  }
  for (const gone of copy.querySelectorAll('[data-noexport], dialog')) gone.remove();
  for (const link of copy.querySelectorAll('a[href^="#"], a[href^="./"]')) link.removeAttribute('href');
  for (const opened of copy.querySelectorAll('details')) opened.open = true;
  const page = document.implementation.createHTMLDocument(`${title} – ElasticFlow`);
  page.documentElement.lang = 'en';
  page.documentElement.dataset.theme = document.documentElement.dataset.theme;
  page.head.append(h('meta', { charset: 'utf-8' }), h('meta', { name: 'viewport', content: 'width=device-width, initial-scale=1' }), h('style', {}, styles()));
  page.body.append(copy, h('footer', { class: 'muted small foot' }, `Saved ${new Date().toLocaleString()} from ElasticFlow`));
  const told = h('script', { type: 'application/json', id: 'data' });
  told.textContent = JSON.stringify(data).replaceAll('<', '\\u003c');
  page.body.append(told);
  const blob = new Blob([`<!doctype html>\n${page.documentElement.outerHTML}`], { type: 'text/html' });
  const link = h('a', { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
