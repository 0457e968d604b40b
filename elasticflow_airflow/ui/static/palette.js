// One colour for each DAG, the same in every view and until the page is left.

const COLOURS = 8;
const given = new Map();

export function colourOf(dag) {
  if (!given.has(dag)) {
    let hash = 7;
    for (const letter of dag) hash = (hash * 31 + letter.codePointAt(0)) >>> 0;
    const taken = new Set(given.values());
    let colour = hash % COLOURS;
    for (let tries = 0; taken.has(colour) && tries < COLOURS && taken.size < COLOURS; tries += 1) colour = (colour + 1) % COLOURS;
    given.set(dag, colour);
  }
  return given.get(dag);
}
