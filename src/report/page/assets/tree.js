  // The tree as rows: what calls what, opened where most of it is.
  const MOST_CHILDREN = 100;
  let opened = new Set([0]), treeCurrent = 0;

  function openHottest() {
    opened = new Set();
    for (let node = 0; node >= 0;) {
      opened.add(node);
      const largest = childrenOf(node).reduce((best, child) => best < 0 || sizeOf(child) > sizeOf(best) ? child : best, -1);
      if (largest < 0 || sizeOf(largest) < 0.2 * sizeOf(0)) break;
      node = largest;
    }
  }
  function treeRows() {
    const rows = [], todo = [[0, 1]];
    while (todo.length && rows.length < 1500) {
      const [node, level, left] = todo.pop();
      if (node < 0) { rows.push({ left, level }); continue; }
      const inside = childrenOf(node).filter((child) => sizeOf(child) > 0).sort((a, b) => sizeOf(b) - sizeOf(a));
      rows.push({ node, level, isParent: inside.length > 0 });
      if (!opened.has(node)) continue;
      if (inside.length > MOST_CHILDREN) todo.push([-1, level + 1, inside.length - MOST_CHILDREN]);
      for (const child of inside.slice(0, MOST_CHILDREN).reverse()) todo.push([child, level + 1]);
    }
    return rows;
  }
  function updateTree() {
    const hadFocus = at("tree").contains(document.activeElement), rows = treeRows();
    if (!rows.some((row) => row.node === treeCurrent)) treeCurrent = 0;
    at("tree").replaceChildren(...rows.map(({ node, level, isParent, left }) => {
      if (node === undefined) return make("div", count(left) + " smaller ones", { class: "tree-row note" });
      const isOpen = opened.has(node);
      const row = make("div", null, { role: "treeitem", class: "tree-row" + (found.has(node) ? " found" : ""), "aria-level": level, tabindex: node === treeCurrent ? 0 : -1, "data-node": node });
      if (isParent) row.setAttribute("aria-expanded", isOpen);
      row.style.setProperty("--level", Math.min(level - 1, 40));
      const size = estimate("span", amount(nodeUsage, node * WIDTH), {});
      row.append(size, make("span", share(sizeOf(node), sizeOf(0)), { class: "number part" }),
        make("span", isParent ? isOpen ? "▾" : "▸" : "", { class: "mark", "aria-hidden": "true" }), make("span", labelOf(node), { class: "tree-label" }));
      return row;
    }));
    if (hadFocus) focusTree(treeCurrent);
  }
  function focusTree(node) {
    const rows = [...at("tree").querySelectorAll("[data-node]")];
    const row = rows.find((row) => Number(row.dataset.node) === node);
    if (!row) return;
    rows.forEach((other) => { other.tabIndex = other === row ? 0 : -1; });
    treeCurrent = node;
    row.focus();
  }
  function toggle(node, isOpen) {
    if (isOpen) opened.add(node); else opened.delete(node);
    treeCurrent = node;
    updateTree();
  }
  function showTree() {
    const tree = at("tree");
    tree.addEventListener("click", (event) => {
      const row = event.target.closest("[data-node]");
      if (row) { toggle(Number(row.dataset.node), !opened.has(Number(row.dataset.node))); focusTree(Number(row.dataset.node)); }
    });
    tree.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const rows = [...tree.querySelectorAll("[data-node]")].map((row) => Number(row.dataset.node)), place = rows.indexOf(treeCurrent);
      const isOpen = opened.has(treeCurrent), inside = childrenOf(treeCurrent).filter((child) => sizeOf(child) > 0);
      const keys = {
        ArrowDown: () => focusTree(rows[place + 1]),
        ArrowUp: () => focusTree(rows[place - 1]),
        ArrowRight: () => isOpen ? focusTree(rows[place + 1]) : inside.length && toggle(treeCurrent, true),
        ArrowLeft: () => isOpen && inside.length ? toggle(treeCurrent, false) : focusTree(parents[treeCurrent]),
        Enter: () => toggle(treeCurrent, !isOpen),
        " ": () => toggle(treeCurrent, !isOpen),
        Home: () => focusTree(rows[0]),
        End: () => focusTree(rows[rows.length - 1]),
      };
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
  }
