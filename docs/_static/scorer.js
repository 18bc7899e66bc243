// Sphinx's own scores, but pages that say how to do a thing come before evidence, design and names.
var Scorer = {
  score: ([page, title, anchor, descr, score]) => {
    const isLater = /^(design|project|benchmarks|reference\/api)\/|^(CHANGELOG|CONTRIBUTING|SECURITY|AGENTS)$/.test(page);
    return isLater ? score - 12 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
