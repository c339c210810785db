// SPDX-License-Identifier: Apache-2.0

package target

import (
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"rblk/internal/version"
	"rblk/wire"
)

// SecretHeader carries a session's secret with DELETE.
const SecretHeader = "Rblk-Secret"

// handler is a request handler whose error becomes the answer.
type handler func(w http.ResponseWriter, r *http.Request) error

func (s *Server) newHTTP() *http.Server {
	mux := http.NewServeMux()
	for pattern, h := range map[string]handler{
		"GET /v1/exports":                      s.getExports,
		"GET /v1/exports/{name}/manifest":      s.getManifest,
		"POST /v1/sessions":                    s.postSession,
		"DELETE /v1/sessions/{id}":             s.deleteSession,
		"POST /v1/sessions/{id}/connections":   s.postConnections,
		"GET /v1/events":                       s.events,
		"GET /v1/status":                       s.getStatus,
		"POST /v1/admin/drain":                 s.admin(s.postDrain),
		"POST /v1/admin/exports":               s.admin(s.postExport),
		"DELETE /v1/admin/exports/{name}":      s.admin(s.deleteExport),
		"POST /v1/admin/exports/{name}/rescan": s.admin(s.postRescan),
		"POST /v1/admin/exports/{name}/resize": s.admin(s.postResize),
	} {
		mux.HandleFunc(pattern, s.authenticated(h))
	}
	metrics := promhttp.HandlerFor(s.metrics.registry, promhttp.HandlerOpts{})
	mux.HandleFunc("GET /metrics", s.authenticated(func(w http.ResponseWriter, r *http.Request) error {
		metrics.ServeHTTP(w, r)
		return nil
	}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /readyz", s.readyz)
	return &http.Server{
		Handler: mux,
		// A client that sends its request drop by drop is not waited for.
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       s.opts.ReadTime,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
}

// authenticated finds out who asks, and turns errors into answers.
func (s *Server) authenticated(h handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !s.serving.TryRLock() {
			s.answerError(w, r, fail(wire.CodeDraining, "target is draining: try again"))
			return
		}
		defer s.serving.RUnlock()
		if r.Header.Get("Origin") != "" {
			// A page in somebody's browser on this host is no administrator.
			s.answerError(w, r, fail(wire.CodeUnauthorized, "requests of web pages are refused"))
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, wire.MaxJSON+1)
		if _, _, err := s.security.principal(r); err != nil {
			s.answerError(w, r, err)
			return
		}
		if err := h(w, r); err != nil {
			s.answerError(w, r, err)
		}
	}
}

// admin lets administrators through.
func (s *Server) admin(h handler) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		_, proven, err := s.security.principal(r)
		if err != nil {
			return err
		}
		if !mayAdminister(r, proven) {
			return fail(wire.CodeUnauthorized, "admin requests come from this host, or with a token or client certificate")
		}
		return h(w, r)
	}
}

var statusOf = map[string]int{
	wire.CodeUnauthorized: http.StatusUnauthorized, wire.CodeUnknownExport: http.StatusNotFound, wire.CodeUnknownSession: http.StatusNotFound,
	wire.CodeReadOnly: http.StatusForbidden, wire.CodeBusy: http.StatusConflict, wire.CodeFenced: http.StatusConflict, wire.CodeInstance: http.StatusConflict,
	wire.CodeLimit: http.StatusTooManyRequests, wire.CodeDraining: http.StatusServiceUnavailable, wire.CodeInternal: http.StatusInternalServerError,
}

func (s *Server) answerError(w http.ResponseWriter, r *http.Request, err error) {
	e := asError(err)
	code, ok := statusOf[e.Code]
	if !ok {
		code = http.StatusBadRequest
	}
	s.log.Info("request refused", "method", r.Method, "path", r.URL.Path, "remote", r.RemoteAddr, "code", e.Code, "err", e.Message)
	answer(w, code, e)
}

func answer(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(v) // an error here means that the client is gone
}

func (s *Server) readyz(w http.ResponseWriter, _ *http.Request) {
	if s.draining.Load() {
		http.Error(w, "draining", http.StatusServiceUnavailable)
		return
	}
	w.Write([]byte("ok\n"))
}

func (s *Server) getExports(w http.ResponseWriter, _ *http.Request) error {
	answer(w, http.StatusOK, wire.ExportList{Protocol: wire.ProtocolVersion, Exports: s.describeAll()})
	return nil
}

func (s *Server) describeAll() []wire.ExportInfo {
	all := []wire.ExportInfo{}
	for _, e := range s.list() {
		i := e.describe()
		i.Confirm = s.confirm(nil)
		all = append(all, i)
	}
	return all
}

func (s *Server) getManifest(w http.ResponseWriter, r *http.Request) error {
	name := r.PathValue("name")
	e := s.export(name)
	if e == nil {
		return fail(wire.CodeUnknownExport, "no export %q here; there is: %s", name, s.names())
	}
	d, ok := e.content.(*data)
	if !ok {
		return fail(wire.CodeBadRequest, "export %s is no dataset: it has no manifest", name)
	}
	p, err := d.manifest()
	if err != nil {
		return fail(wire.CodeInternal, "%v", err)
	}
	etag := `"` + p.tree.Manifest.Digest() + `"`
	w.Header().Set("ETag", etag)
	w.Header().Set("Vary", "Accept-Encoding")
	if r.Header.Get("If-None-Match") == etag {
		w.WriteHeader(http.StatusNotModified)
		return nil
	}
	body := p.plain
	if strings.Contains(r.Header.Get("Accept-Encoding"), "zstd") {
		w.Header().Set("Content-Encoding", "zstd")
		body = p.zstd
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.Write(body)
	return nil
}

func (s *Server) postSession(w http.ResponseWriter, r *http.Request) error {
	var req wire.SessionRequest
	if err := wire.DecodeJSON(r.Body, &req); err != nil {
		return err
	}
	who, _, err := s.security.principal(r)
	if err != nil {
		return err
	}
	reply, err := s.open(&req, who, r.RemoteAddr)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, reply)
	return nil
}

func (s *Server) deleteSession(w http.ResponseWriter, r *http.Request) error {
	x, err := s.session(r.PathValue("id"), r.Header.Get(SecretHeader))
	if err != nil {
		return err
	}
	s.endSession(x, claimDropped)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) postConnections(w http.ResponseWriter, r *http.Request) error {
	var req wire.ConnectionsRequest
	if err := wire.DecodeJSON(r.Body, &req); err != nil {
		return err
	}
	x, err := s.session(r.PathValue("id"), req.Secret)
	if err != nil {
		return err
	}
	if req.Epoch != x.epochNow() {
		return fail(wire.CodeFenced, "epoch %d of the session is over", req.Epoch)
	}
	tokens, err := x.more(req.Count)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, wire.TokensReply{Tokens: tokens})
	return nil
}

func (s *Server) getStatus(w http.ResponseWriter, _ *http.Request) error {
	answer(w, http.StatusOK, s.Status())
	return nil
}

// Status tells how the target is.
func (s *Server) Status() wire.TargetStatus {
	st := wire.TargetStatus{
		Version: version.Version, Daemon: s.daemon, UptimeS: int64(time.Since(s.start).Seconds()), Draining: s.draining.Load(),
		Data: s.DataAddrs(), Exports: s.describeAll(), Sessions: []wire.SessionStatus{}, Frames: s.framesStatus(),
	}
	for _, x := range s.sessionList() {
		x.mu.Lock()
		st.Sessions = append(st.Sessions, wire.SessionStatus{
			Session: x.id, Export: x.exp.name, Access: x.access, Client: x.client, Address: x.address,
			AgeSecond: int64(time.Since(x.since).Seconds()), Connections: len(x.conns), Grants: len(x.grants),
		})
		x.mu.Unlock()
	}
	return st
}

func (s *Server) framesStatus() wire.FramesStatus {
	s.mu.Lock()
	p := s.frames
	s.mu.Unlock()
	if p == nil {
		return wire.FramesStatus{}
	}
	fs := wire.FramesStatus{Size: int64(len(p.mem))}
	p.mu.Lock()
	fs.Free = len(p.free) * slabFrames
	stagers := make([]*stager, 0, len(p.stagers))
	for st := range p.stagers {
		stagers = append(stagers, st)
	}
	p.mu.Unlock()
	for _, st := range stagers {
		st.counts(&fs)
	}
	return fs
}

func (s *Server) postDrain(w http.ResponseWriter, _ *http.Request) error {
	w.WriteHeader(http.StatusNoContent)
	s.Drain()
	return nil
}

// AdminExport is the body of POST /v1/admin/exports: one of Memory and Dataset.
type AdminExport struct {
	Name    string        `json:"name"`
	Memory  *AdminMemory  `json:"memory,omitempty"`
	Dataset *AdminDataset `json:"dataset,omitempty"`
}

// AdminMemory asks for a memory export.
type AdminMemory struct {
	Size      int64 `json:"size"`
	HugePages int64 `json:"hugepages,omitempty"`
}

// AdminDataset asks for a dataset export.
type AdminDataset struct {
	Path string `json:"path"`
}

// AdminResize is the body of …/resize.
type AdminResize struct {
	Size int64 `json:"size"`
}

// AdminRescan is the answer of …/rescan.
type AdminRescan struct {
	Changed bool `json:"changed"`
}

func (s *Server) postExport(w http.ResponseWriter, r *http.Request) error {
	var a AdminExport
	if err := wire.DecodeJSON(r.Body, &a); err != nil {
		return err
	}
	var err error
	switch {
	case a.Memory != nil && a.Dataset == nil:
		err = s.AddMemory(r.Context(), MemoryConfig{Name: a.Name, Size: a.Memory.Size, HugePages: a.Memory.HugePages})
	case a.Dataset != nil && a.Memory == nil:
		err = s.AddDataset(r.Context(), DatasetConfig{Name: a.Name, Path: a.Dataset.Path})
	default:
		err = errors.New("say either memory or dataset")
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) deleteExport(w http.ResponseWriter, r *http.Request) error {
	if err := s.Remove(r.PathValue("name")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) postRescan(w http.ResponseWriter, r *http.Request) error {
	changed, err := s.Rescan(r.Context(), r.PathValue("name"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, AdminRescan{changed})
	return nil
}

func (s *Server) postResize(w http.ResponseWriter, r *http.Request) error {
	var a AdminResize
	if err := wire.DecodeJSON(r.Body, &a); err != nil {
		return err
	}
	if err := s.Resize(r.PathValue("name"), a.Size); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
