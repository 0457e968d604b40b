// Asks for another deadline of a job, or none.

import { h } from './dom.js';
import * as f from './format.js';
import { jobName } from './parts.js';

/** Opens the question; `change({deadline_at})` or `change({best_effort: true})` is called when it was answered. */
export function amendment(status, change) {
  const at = status.deadline_at ?? status.projected_finish_at ?? f.nowS() + 3600;
  const input = h('input', { type: 'datetime-local', class: 'input', id: 'new-deadline', value: f.toInput(at), min: f.toInput(f.nowS()) });
  const dialog = h('dialog', { 'aria-labelledby': 'amend-title' },
    h('form', { method: 'dialog' },
      h('h2', { id: 'amend-title' }, 'Change the deadline'),
      h('p', {}, `${jobName(status.identity)}${status.projected_finish_at ? ` is projected to finish ${f.moment(status.projected_finish_at)}` : ''}. An earlier deadline is taken only if it can be kept beside all other promises.`),
      h('p', {}, h('label', { for: 'new-deadline' }, 'New deadline '), input),
      h('div', { class: 'buttons' },
        h('button', { value: 'no', class: 'button', formnovalidate: '' }, 'Leave it'),
        status.best_effort ? null : h('button', { value: 'none', class: 'button', formnovalidate: '' }, 'Give it up'),
        h('button', { value: 'yes', class: 'button primary' }, 'Change'))));
  dialog.addEventListener('close', () => {
    const wanted = f.fromInput(input.value);
    if (dialog.returnValue === 'yes' && wanted) change({ deadline_at: wanted });
    else if (dialog.returnValue === 'none') change({ best_effort: true });
    dialog.remove();
  });
  document.body.append(dialog);
  dialog.showModal();
}
