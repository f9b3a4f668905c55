// Browsers refuse to start a web worker from a page opened as a file. The search of the site runs in
// a worker, so on file: pages a hidden frame takes the worker's place: same messages, same thread.
(() => {
  if (location.protocol !== "file:") return;

  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inner = this.frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source !== inner) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      inner.document.open();
      inner.document.write("<html><body></body></html>");
      inner.document.close();
      inner.importScripts = async (...urls) => {
        for (const one of urls) await load(inner, one);
      };
      // The frame posts to its parent by a script of its own, so that it is the message's source.
      const bridge = inner.document.createElement("script");
      bridge.textContent = "postMessage = (data) => parent.postMessage(data, '*')";
      inner.document.body.appendChild(bridge);
      this.ready = load(inner, url);
    }

    postMessage(data) {
      this.ready.then(() => {
        const inner = this.frame.contentWindow;
        inner.dispatchEvent(new inner.MessageEvent("message", { data: structuredClone(data) }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  }

  function load(inner, url) {
    return new Promise((resolve, reject) => {
      const script = inner.document.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = reject;
      inner.document.body.appendChild(script);
    });
  }

  window.Worker = FrameWorker;
})();
