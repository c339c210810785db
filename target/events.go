// SPDX-License-Identifier: Apache-2.0

package target

import (
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"rblk/wire"
)

// hub hands events to those who listen. One that does not keep up is cut off:
// it asks for the state of things when it comes back.
type hub struct {
	mu     sync.Mutex
	subs   map[chan message]string // guarded by mu: and the export it cares for, "" for all
	closed bool                    // guarded by mu
}

type message struct {
	event string
	data  []byte
}

// backlog of events that a listener may be behind.
const backlog = 16

func newHub() *hub { return &hub{subs: map[chan message]string{}} }

func (h *hub) publish(event string, e wire.Event) {
	data, err := json.Marshal(e)
	if err != nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for ch, export := range h.subs {
		if export != "" && e.Export != "" && e.Export != export {
			continue
		}
		select {
		case ch <- message{event, data}:
		default:
			delete(h.subs, ch)
			close(ch)
		}
	}
}

func (h *hub) subscribe(export string) (chan message, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, false
	}
	ch := make(chan message, backlog)
	h.subs[ch] = export
	return ch, true
}

func (h *hub) unsubscribe(ch chan message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.subs, ch)
}

// close ends every stream behind what was published.
func (h *hub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for ch := range h.subs {
		delete(h.subs, ch)
		close(ch)
	}
}

// writePresent tells a new listener how its export is now: what happened before
// it listened is no event to it any more.
func (s *Server) writePresent(export string, write func(string, ...any) bool) bool {
	e := s.export(export)
	if e == nil {
		return true
	}
	i := e.info()
	data, err := json.Marshal(wire.Event{Export: export, Info: &i})
	return err == nil && write("event: %s\ndata: %s\n\n", wire.EventResize, data)
}

// events streams server-sent events (HTML living standard, section 9.2).
func (s *Server) events(w http.ResponseWriter, r *http.Request) error {
	ch, ok := s.hub.subscribe(r.URL.Query().Get("export"))
	if !ok {
		return fail(wire.CodeDraining, "target is draining")
	}
	defer s.hub.unsubscribe(ch)
	rc := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	alive := time.NewTicker(s.opts.Keepalive)
	defer alive.Stop()
	write := func(format string, args ...any) bool {
		rc.SetWriteDeadline(time.Now().Add(s.opts.Dead))
		_, err := fmt.Fprintf(w, format, args...)
		return err == nil && rc.Flush() == nil
	}
	if !write(": rblk\n\n") || !s.writePresent(r.URL.Query().Get("export"), write) {
		return nil
	}
	for {
		select {
		case m, ok := <-ch:
			if !ok || !write("event: %s\ndata: %s\n\n", m.event, m.data) {
				return nil
			}
		case <-alive.C:
			if !write(": alive\n\n") {
				return nil
			}
		case <-r.Context().Done():
			return nil
		}
	}
}
