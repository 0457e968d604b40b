// Builds and updates the document. Text is always set as text: nothing that a job says can become markup.

const SVG = 'http://www.w3.org/2000/svg';

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'style' && typeof value === 'object') {
      for (const [one, to] of Object.entries(value)) node.style.setProperty(one, String(to));
    } else {
      node.setAttribute(name, value === true ? '' : String(value));
    }
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === '') continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** An HTML element: h('p', {class: 'note'}, 'text', child, [children]). */
export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);

/** An SVG element, in the same way. */
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

const keyOf = (node) => (node.nodeType === 1 ? node.getAttribute('data-key') : null);

const alike = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && keyOf(a) === keyOf(b);

/** Make `into` look like `wanted`, keeping its nodes, so that focus, scrolling and selection survive an update. */
export function morph(into, wanted) {
  if (into.nodeType === 3) {
    if (into.data !== wanted.data) into.data = wanted.data;
    return;
  }
  if (into.nodeType !== 1) return;
  morphAttributes(into, wanted);
  morphControl(into, wanted);
  if (into.hasAttribute('data-keep')) return; // Somebody else draws inside.
  morphChildren(into, wanted);
}

function morphAttributes(into, wanted) {
  for (const { name } of [...into.attributes]) {
    if (wanted.hasAttribute(name)) continue;
    if (name === 'open' && into.nodeName === 'DETAILS') continue;
    if (into.hasAttribute('data-keep') && (name === 'class' || name === 'style')) continue;
    into.removeAttribute(name);
  }
  for (const { name, value } of [...wanted.attributes]) {
    if (into.hasAttribute('data-keep') && (name === 'class' || name === 'style')) continue;
    if (name === 'open' && into.nodeName === 'DETAILS' && into.hasAttribute('data-key')) continue;
    if (into.getAttribute(name) !== value) into.setAttribute(name, value);
  }
}

/** What the user did to a control is a property, which attributes do not reach. */
function morphControl(into, wanted) {
  if (into.nodeName === 'OPTION') into.selected = wanted.hasAttribute('selected');
  if (into.nodeName !== 'INPUT') return;
  if (into.type === 'checkbox') into.checked = wanted.hasAttribute('checked');
  else if (wanted.hasAttribute('value') && document.activeElement !== into) into.value = wanted.getAttribute('value');
}

function morphChildren(into, wanted) {
  const stay = new Set([...wanted.childNodes].map(keyOf));
  for (const child of [...into.childNodes]) {
    // Before anything else: whatever is moved into its place would lose focus, or what somebody drags.
    if (keyOf(child) !== null && !stay.has(keyOf(child))) child.remove();
  }
  const keyed = new Map();
  for (const child of into.childNodes) if (keyOf(child) !== null) keyed.set(keyOf(child), child);
  let at = into.firstChild;
  for (const next of [...wanted.childNodes]) {
    const key = keyOf(next);
    const known = key === null ? null : keyed.get(key);
    if (known && alike(known, next)) {
      if (known === at) at = at.nextSibling;
      else into.insertBefore(known, at);
      morph(known, next);
    } else if (at && alike(at, next)) {
      const here = at;
      at = at.nextSibling;
      morph(here, next);
    } else {
      into.insertBefore(next, at);
    }
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

/** Show these nodes in an element, by as few changes as possible. */
export function show(into, ...children) {
  morphChildren(into, fill(document.createElement('div'), {}, children));
}

/** Tell a screen reader something that has just happened. */
export function say(text) {
  document.getElementById('said').textContent = text;
}
