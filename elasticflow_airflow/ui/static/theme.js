// Light or dark: as Airflow's page around this one, else as the system says.

const system = matchMedia('(prefers-color-scheme: dark)');
const heard = [];

function around() {
  try {
    return window.parent === window ? null : window.parent.document.documentElement;
  } catch {
    return null; // Another site's page frames us.
  }
}

function wanted() {
  const root = around();
  if (root) {
    if (root.classList.contains('dark') || root.dataset.theme === 'dark') return 'dark';
    if (root.classList.contains('light') || root.dataset.theme === 'light') return 'light';
  }
  return system.matches ? 'dark' : 'light';
}

function apply() {
  const now = wanted();
  if (document.documentElement.dataset.theme === now) return;
  document.documentElement.dataset.theme = now;
  for (const told of heard) told(now);
}

/** Airflow's own brand colour, where its configuration (`[api] theme`) names one; `brand` are its shades by number. */
export function paint(brand) {
  const sheet = new CSSStyleSheet();
  const rule = (theme, accent, soft, on) => `[data-theme='${theme}'] { --accent: ${accent}; --accent-soft: ${soft}; --on-accent: ${on}; }`;
  sheet.replaceSync(`${rule('light', brand[700], brand[100], '#ffffff')}\n${rule('dark', brand[300], brand[900], brand[950])}`);
  document.adoptedStyleSheets = [sheet];
  for (const told of heard) told(wanted());
}

/** Follow the theme from now on. */
export function follow() {
  apply();
  if (window.parent !== window) document.documentElement.dataset.framed = ''; // Airflow's header is above already.
  system.addEventListener('change', apply);
  const root = around();
  if (root) new MutationObserver(apply).observe(root, { attributes: true, attributeFilter: ['class', 'data-theme'] });
}

/** Be told when it changes. */
export const onChange = (tell) => heard.push(tell);

/** A colour or another token of the style sheet. */
export const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
