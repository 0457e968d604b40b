// One colour for each DAG, the same in every view, and in this browser from visit to visit.

const COLOURS = 8;
const KEPT = 'elasticflow-colours';
const MOST = 400;
const given = new Map(kept());

function kept() {
  try {
    return Object.entries(JSON.parse(localStorage.getItem(KEPT) ?? '{}')).filter(([, colour]) => Number.isInteger(colour) && colour >= 0 && colour < COLOURS);
  } catch {
    return []; // Nothing can be kept here, or it is not ours.
  }
}

function keep() {
  try {
    localStorage.setItem(KEPT, JSON.stringify(Object.fromEntries([...given].slice(-MOST))));
  } catch {
    // They last until the page is left, then.
  }
}

/** The number of its colour: the one its name leads to, unless another DAG has it and one is free. */
export function colourOf(dag) {
  if (!given.has(dag)) {
    let hash = 7;
    for (const letter of dag) hash = (hash * 31 + letter.codePointAt(0)) >>> 0;
    const taken = new Set(given.values());
    let colour = hash % COLOURS;
    for (let tries = 0; taken.has(colour) && tries < COLOURS && taken.size < COLOURS; tries += 1) colour = (colour + 1) % COLOURS;
    given.set(dag, colour);
    keep();
  }
  return given.get(dag);
}
