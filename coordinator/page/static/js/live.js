// The live view: one stream of events, opened again for as long as the page is open.

const RETRY = 3000;

export function listen(onStatus, onLost) {
  let heardAt = null;
  function connect() {
    const events = new EventSource("/events");
    events.onmessage = (event) => {
      heardAt = new Date();
      onStatus(JSON.parse(event.data));
    };
    events.onerror = () => {
      onLost(heardAt);
      // Refused: a browser does not try again by itself.
      if (events.readyState === EventSource.CLOSED) setTimeout(connect, RETRY);
    };
  }
  connect();
}
