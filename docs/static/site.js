// A button that copies a block of commands or code. Blocks of output have none.
addEventListener("DOMContentLoaded", () => {
  const blocks = "div[class*=highlight-]:not(.highlight-text, .highlight-none) pre";
  for (const pre of document.querySelectorAll(blocks)) {
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = "copy";
    button.onclick = async () => {
      const code = pre.cloneNode(true);
      code.querySelectorAll(".linenos").forEach((number) => number.remove());
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
      setTimeout(() => (button.textContent = "copy"), 1500);
    };
    pre.parentNode.append(button);
  }
});
