// A JupyterLab extension that needs no build. It tells cells.css which cell is what: the page has no tags of its own
// (github.com/jupyterlab/jupyterlab/issues/8298).
//
// JupyterLab loads this file, asks its container for the module "./cells", and activates the plugin that it finds there.

(() => {
  const styles = document.createElement("link");
  styles.rel = "stylesheet";
  styles.href = new URL("cells.css", document.currentScript.src).href;
  document.head.append(styles);

  const KINDS = ["guess", "exercise", "solution", "check"];

  function showKinds(notebook) {
    for (const cell of notebook.widgets) {
      const kind = cell.model.getMetadata("tags")?.find((tag) => KINDS.includes(tag));
      if (kind) cell.node.dataset.workshop = kind;
      if (cell.model.type === "code" && !("verdict" in cell.node.dataset)) {
        showVerdict(cell);
        cell.model.outputs.changed.connect(() => showVerdict(cell));
      }
    }
  }

  function showVerdict(cell) {
    // A check says one of both, and so does a cell that sets a guess beside a measurement, if the guess is no number.
    const outputs = cell.model.outputs.toJSON();
    const said = outputs.flatMap((output) => [output.text ?? output.traceback ?? []].flat()).join("\n");
    cell.node.dataset.verdict = /^(Correct|Not yet)\b/m.exec(said)?.[1] ?? "";
  }

  function stayClean(model, key) {
    // A kernel writes its version of Python into the notebook. That is nothing that a user would have to save.
    if (["kernelspec", "language_info"].includes(key) && !model.dirty) {
      queueMicrotask(() => (model.dirty = false));
    }
  }

  const plugin = {
    id: "workshop:cells",
    description: "Cells look like what they are: guess, exercise, solution, check.",
    autoStart: true,
    activate: (app) => {
      app.docRegistry.addWidgetExtension("Notebook", {
        createNew: ({ content, model }) => {
          showKinds(content);
          model.cells.changed.connect(() => showKinds(content));
          model.metadataChanged.connect((_, { key }) => stayClean(model, key));
        },
      });
    },
  };

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB.workshop = { init: () => {}, get: async () => () => ({ __esModule: true, default: plugin }) };
})();
