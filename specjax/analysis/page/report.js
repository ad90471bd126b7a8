"use strict";
// Without this script the page shows everything but the trees.
(() => {
  const drawn = JSON.parse(document.getElementById("drawn").textContent);
  const panel = document.getElementById("panel");
  const caption = document.getElementById("caption");
  const tree = document.getElementById("tree");
  const SVG = "http://www.w3.org/2000/svg";
  const CHARACTER = 7.3, ROW = 26, BOX = 20, GAP = 34, MOST = 16; // pixels, and characters of a label
  let chosen = null;

  function add(parent, name, attributes, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  const label = (node) => {
    const characters = [...node.text];
    return characters.length > MOST ? characters.slice(0, MOST - 1).join("") + "…" : node.text;
  };

  // The root at the left, so that a path reads as the text does.
  function draw(step, selected) {
    const nodes = step.nodes;
    const width = Math.max(...nodes.map((node) => [...label(node)].length)) * CHARACTER + 14;
    const x = (node) => 4 + node.depth * (width + GAP);
    const y = (node) => 4 + node.across * ROW;
    const right = Math.max(...nodes.map(x)) + width + 4, bottom = Math.max(...nodes.map(y)) + BOX + 4;
    const svg = document.createElementNS(SVG, "svg");
    for (const [key, value] of Object.entries({
      width: right, height: bottom, viewBox: `0 0 ${right} ${bottom}`, role: "img", "aria-label": step.caption,
    })) svg.setAttribute(key, value);
    const isOnPath = (node) => node.kind !== "refused";
    for (const node of nodes.slice(1)) {
      const parent = nodes[node.parent], own = node.kind !== "refused" && node.kind !== "accepted";
      add(svg, "line", {
        x1: x(parent) + width, y1: y(parent) + BOX / 2, x2: x(node), y2: y(node) + BOX / 2,
        class: (isOnPath(node) ? "on-path" : "") + (own ? " own" : ""),
      });
    }
    nodes.forEach((node, number) => {
      const names = [node.kind, isOnPath(node) ? "on-path" : "", number === selected ? "chosen" : ""];
      const group = add(svg, "g", { class: names.join(" ").trim(), "data-node": number });
      add(group, "title", {}, `${node.text}: ${node.kind}`);
      add(group, "rect", { x: x(node), y: y(node), width: width, height: BOX, rx: 4 });
      add(group, "text", { x: x(node) + 7, y: y(node) + 14 }, label(node));
    });
    tree.replaceChildren(svg);
  }

  function forget() {
    if (chosen) chosen.removeAttribute("aria-current");
    for (const token of document.querySelectorAll(".same-pass")) token.classList.remove("same-pass");
    chosen = null;
  }

  function show(token) {
    forget();
    chosen = token;
    const step = drawn[token.parentElement.dataset.text][token.dataset.step];
    token.setAttribute("aria-current", "true");
    for (const other of token.parentElement.children) {
      other.classList.toggle("same-pass", other.dataset.step === token.dataset.step);
    }
    draw(step, Number(token.dataset.node));
    panel.hidden = false;
    caption.textContent = step.caption;
    tree.querySelector(".chosen").scrollIntoView({ block: "nearest", inline: "nearest" });
    token.scrollIntoView({ block: "nearest" });
  }

  function close() {
    const token = chosen;
    forget();
    panel.hidden = true;
    if (token) token.focus();
  }

  // The nearest token in the next line above or below.
  function inLine(tokens, from, direction) {
    const here = from.getBoundingClientRect();
    const middle = (box) => (box.left + box.right) / 2;
    let best = from, least = Infinity;
    for (const token of tokens) {
      const box = token.getBoundingClientRect();
      const lines = direction * Math.round(box.top - here.top);
      const far = lines * 1e4 + Math.abs(middle(box) - middle(here));
      if (lines > 4 && far < least) [best, least] = [token, far];
    }
    return best;
  }

  function focus(tokens, token) {
    for (const other of tokens) other.tabIndex = other === token ? 0 : -1;
    token.focus();
  }

  for (const text of document.querySelectorAll(".text")) {
    const tokens = [...text.querySelectorAll(".token")];
    text.addEventListener("click", (event) => {
      const token = event.target.closest(".token");
      if (!token) return;
      focus(tokens, token);
      show(token); // Enter and the space bar click, too: tokens are buttons.
    });
    text.addEventListener("keydown", (event) => {
      const from = event.target.closest(".token");
      if (!from || event.ctrlKey || event.altKey || event.metaKey) return;
      const place = tokens.indexOf(from);
      const to = {
        ArrowRight: () => tokens[Math.min(place + 1, tokens.length - 1)],
        ArrowLeft: () => tokens[Math.max(place - 1, 0)],
        ArrowDown: () => inLine(tokens, from, 1),
        ArrowUp: () => inLine(tokens, from, -1),
        Home: () => tokens[0],
        End: () => tokens[tokens.length - 1],
      }[event.key];
      if (!to) return;
      event.preventDefault();
      focus(tokens, to());
    });
  }
  document.getElementById("close").addEventListener("click", close);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !panel.hidden) close();
  });
})();
