// Looks a page over as a screen reader and a person with weak eyes would; returns what is wrong.
() => {
  const problems = [];
  const visible = (element) =>
    element.checkVisibility({ checkOpacity: false, checkVisibilityCSS: true });
  const words = (element) => (element?.textContent ?? "").trim();
  const named = (ids) =>
    ids
      .split(/\s+/)
      .map((id) => words(document.getElementById(id)))
      .join(" ")
      .trim();
  const name = (element) =>
    element.getAttribute("aria-label")?.trim() ||
    (element.hasAttribute("aria-labelledby")
      ? named(element.getAttribute("aria-labelledby"))
      : "") ||
    [...(element.labels ?? [])].map(words).join(" ").trim() ||
    (element.matches("button, a, summary") ? words(element) : "") ||
    element.getAttribute("alt");
  const where = (element) => element.outerHTML.slice(0, 90).replace(/\s+/g, " ");

  if (!document.documentElement.lang) problems.push("the page has no language");
  if (!document.title) problems.push("the page has no title");
  for (const landmark of ["header", "main", "h1"]) {
    const found = document.querySelectorAll(landmark).length;
    if (found !== 1) problems.push(`${found} of <${landmark}>`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of ids)
    if (ids.indexOf(id) !== ids.lastIndexOf(id)) problems.push(`id ${id} twice`);
  for (const attribute of ["aria-labelledby", "aria-describedby", "for"]) {
    for (const element of document.querySelectorAll(`[${attribute}]`)) {
      for (const id of element.getAttribute(attribute).split(/\s+/)) {
        if (!document.getElementById(id))
          problems.push(`${attribute} of nothing: ${where(element)}`);
      }
    }
  }
  const wantName =
    "button, a[href], input, textarea, select, [tabindex], [role=img], [role=log], [role=region], dialog, section";
  for (const element of document.querySelectorAll(wantName)) {
    if (visible(element) && !name(element)) problems.push(`no name: ${where(element)}`);
  }
  for (const image of document.querySelectorAll("img:not([alt])"))
    problems.push(`no alt: ${where(image)}`);
  let level = 0;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    if (!visible(heading)) continue;
    const own = Number(heading.tagName[1]);
    if (own > level + 1) problems.push(`heading level jumps to ${own}: ${where(heading)}`);
    level = own;
  }
  for (const list of document.querySelectorAll("ul, ol")) {
    for (const child of list.children)
      if (child.tagName !== "LI") problems.push(`not an item: ${where(child)}`);
  }

  // Contrast: WCAG 2.2 AA, text against the nearest backgrounds, blended.
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under) =>
    top.slice(0, 3).map((part, i) => part * top[3] + under[i] * (1 - top[3]));
  const luminance = (color) => {
    const [r, g, b] = color.map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const background = (element) => {
    const layers = [];
    for (let node = element; node; node = node.parentElement) {
      layers.push(rgba(getComputedStyle(node).backgroundColor));
    }
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const opacity = (element) =>
    element ? Number(getComputedStyle(element).opacity) * opacity(element.parentElement) : 1;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let looked = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (
      !walker.currentNode.data.trim() ||
      !visible(element) ||
      element.closest("script, .hidden, .skip")
    )
      continue;
    looked += 1;
    const style = getComputedStyle(element);
    const under = background(element);
    const [red, green, blue, alpha] = rgba(style.color);
    const found = ratio(over([red, green, blue, alpha * opacity(element)], under), under);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (found < (isLarge ? 3 : 4.5))
      problems.push(`contrast ${found.toFixed(2)}: ${where(element)}`);
  }
  for (const graphic of document.querySelectorAll(
    ".segment, .swatch, .block[data-kind=reserved]",
  )) {
    const parent = graphic.closest(".receipt, .worker");
    const found = ratio(background(graphic), background(parent));
    if (found < 3) problems.push(`contrast ${found.toFixed(2)} of a graphic: ${where(graphic)}`);
  }
  return { problems: [...new Set(problems)], looked };
};
