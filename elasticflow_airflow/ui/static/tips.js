// A hint beside what the pointer or the keyboard is on: the lines of its data-tip.

import { h } from './dom.js';

export function listenForTips() {
  const tip = document.getElementById('tip');
  let on = null;

  function put(x, y) {
    const { width, height } = tip.getBoundingClientRect();
    const left = Math.max(8, Math.min(x + 14, document.documentElement.clientWidth - width - 8));
    const above = y - height - 12;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 8 ? above : y + 18}px`;
  }

  function tell(target, x, y) {
    if (!target) {
      tip.hidden = true;
      on = null;
      return;
    }
    if (on !== target || tip.hidden) {
      on = target;
      const [first, ...rest] = target.dataset.tip.split('\n');
      tip.replaceChildren(h('strong', {}, first), ...rest.map((line) => h('div', {}, line)));
      tip.hidden = false;
    }
    put(x, y);
  }

  const tipped = (event) => (event.target instanceof Element ? event.target.closest('[data-tip]') : null);
  document.addEventListener('pointermove', (event) => tell(tipped(event), event.clientX, event.clientY));
  document.addEventListener('pointerdown', (event) => tell(tipped(event), event.clientX, event.clientY));
  document.addEventListener('focusin', (event) => {
    const target = tipped(event);
    if (!target || !target.matches(':focus-visible')) return;
    const box = target.getBoundingClientRect();
    tell(target, box.left, box.top);
  });
  document.addEventListener('focusout', () => tell(null));
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') tell(null);
  });
  document.addEventListener('scroll', () => tell(null), { passive: true });
}
