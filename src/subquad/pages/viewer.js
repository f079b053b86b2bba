// a place of the image that is clicked, or moved to with the arrow keys: where it looks, in every layer of every network
for (const viewer of document.querySelectorAll(".viewer")) {
  const data = JSON.parse(viewer.querySelector("script").textContent);
  const picture = viewer.querySelector(".query");
  const cells = [...viewer.querySelectorAll("canvas[data-layer]")];
  for (const layer of data.layers) layer.bytes = Int8Array.from(atob(layer.weights), (c) => c.charCodeAt(0));
  let place = [0.5, 0.5], token = false;
  const colour = (share, signed) => {
    const mix = (a, b, t) => a.map((v, k) => Math.round(v + (b[k] - v) * t));
    if (!signed) return share < 0.5 ? mix([12, 8, 38], [190, 55, 82], share * 2) : mix([190, 55, 82], [252, 240, 165], share * 2 - 1);
    return share < 0 ? mix([247, 247, 247], [33, 102, 172], -share) : mix([247, 247, 247], [178, 24, 43], share);
  };
  const row = (layer) => {
    const [height, width] = layer.queries;
    if (token && layer.prefix) return height * width;
    const clip = (share, side) => Math.min(side - 1, Math.max(0, Math.floor(share * side)));
    return clip(place[0], height) * width + clip(place[1], width);
  };
  const draw = () => {
    for (const canvas of cells) {
      const layer = data.layers[canvas.dataset.layer], [height, width] = layer.keys, size = height * width;
      const values = layer.bytes.subarray(row(layer) * size, row(layer) * size + size);
      const top = values.reduce((most, v) => Math.max(most, Math.abs(v)), 1);
      canvas.width = width; canvas.height = height;
      const pen = canvas.getContext("2d"), image = pen.createImageData(width, height);
      values.forEach((v, k) => image.data.set([...colour(v / top, layer.signed), 255], 4 * k));
      pen.putImageData(image, 0, 0);
      canvas.title = `largest weight ${(top * layer.scale).toPrecision(2)}`;
    }
    const mark = viewer.querySelector(".mark");
    mark.style.display = token ? "none" : "block";
    mark.style.left = `${100 * place[1]}%`;
    mark.style.top = `${100 * place[0]}%`;
  };
  picture.addEventListener("click", (event) => {
    const box = picture.getBoundingClientRect();
    place = [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
    token = false;
    draw();
  });
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [height, width] = data.layers[0].queries;
    place = [place[0] + step[0] / height, place[1] + step[1] / width].map((share) => Math.min(0.999, Math.max(0, share)));
    token = false;
    draw();
  });
  viewer.querySelector("button.token")?.addEventListener("click", () => { token = true; draw(); });
  draw();
}
