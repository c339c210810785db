// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"log/syslog"
	"os"
	"path/filepath"
	"strings"

	"github.com/coreos/go-systemd/v22/journal"
)

// openLog opens the log that the option log= names: stderr, journal, syslog,
// none, or the absolute path of a file that is appended to. "" is the default:
// stderr in the foreground, else the journal or syslog, whichever there is.
// What is returned must be closed.
func openLog(where string, level slog.Level, foreground bool) (*slog.Logger, io.Closer, error) {
	opts := &slog.HandlerOptions{Level: level}
	switch {
	case where == "stderr", where == "" && foreground:
		return slog.New(slog.NewTextHandler(os.Stderr, opts)), nopCloser{}, nil
	case where == "journal", where == "" && journal.Enabled():
		if !journal.Enabled() {
			return nil, nil, fmt.Errorf("log=journal: the systemd journal does not run here (use log=syslog or log=/path/to/file)")
		}
		return slog.New(newLineHandler(level, sendJournal)), nopCloser{}, nil
	case where == "syslog", where == "":
		w, err := syslog.New(syslog.LOG_DAEMON|syslog.LOG_INFO, "rmount")
		if err != nil && where == "" {
			return slog.New(slog.DiscardHandler), nopCloser{}, nil
		}
		if err != nil {
			return nil, nil, fmt.Errorf("log=syslog: %w (use log=/path/to/file)", err)
		}
		return slog.New(newLineHandler(level, func(l slog.Level, line string) error { return sendSyslog(w, l, line) })), w, nil
	case where == "none":
		return slog.New(slog.DiscardHandler), nopCloser{}, nil
	case filepath.IsAbs(where):
		f, err := os.OpenFile(where, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o640)
		if err != nil {
			return nil, nil, fmt.Errorf("log=%s: %w", where, err)
		}
		return slog.New(slog.NewTextHandler(f, opts)), f, nil
	}
	return nil, nil, usageError(fmt.Sprintf("log=%s: want stderr, journal, syslog, none or an absolute path", where))
}

type nopCloser struct{}

func (nopCloser) Close() error { return nil }

// lineHandler gives each record as one line, with its level, to a log that
// stamps the time itself.
type lineHandler struct {
	slog.Handler // formats into buf
	buf          *bytes.Buffer
	turn         chan struct{} // held while buf is used
	emit         func(level slog.Level, line string) error
}

func newLineHandler(level slog.Level, emit func(slog.Level, string) error) *lineHandler {
	buf := new(bytes.Buffer)
	text := slog.NewTextHandler(buf, &slog.HandlerOptions{Level: level, ReplaceAttr: dropStamp})
	return &lineHandler{Handler: text, buf: buf, turn: make(chan struct{}, 1), emit: emit}
}

// dropStamp leaves out what the log adds by itself.
func dropStamp(groups []string, a slog.Attr) slog.Attr {
	if len(groups) == 0 && (a.Key == slog.TimeKey || a.Key == slog.LevelKey) {
		return slog.Attr{}
	}
	return a
}

func (h *lineHandler) Handle(ctx context.Context, r slog.Record) error {
	h.turn <- struct{}{}
	defer func() { <-h.turn }()
	h.buf.Reset()
	if err := h.Handler.Handle(ctx, r); err != nil {
		return err
	}
	return h.emit(r.Level, strings.TrimSpace(h.buf.String()))
}

func (h *lineHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	clone := *h
	clone.Handler = h.Handler.WithAttrs(attrs)
	return &clone
}

func (h *lineHandler) WithGroup(name string) slog.Handler {
	clone := *h
	clone.Handler = h.Handler.WithGroup(name)
	return &clone
}

func sendSyslog(w *syslog.Writer, level slog.Level, line string) error {
	switch {
	case level >= slog.LevelError:
		return w.Err(line)
	case level >= slog.LevelWarn:
		return w.Warning(line)
	case level >= slog.LevelInfo:
		return w.Info(line)
	}
	return w.Debug(line)
}

func sendJournal(level slog.Level, line string) error {
	priority := journal.PriDebug
	switch {
	case level >= slog.LevelError:
		priority = journal.PriErr
	case level >= slog.LevelWarn:
		priority = journal.PriWarning
	case level >= slog.LevelInfo:
		priority = journal.PriInfo
	}
	return journal.Send(line, priority, map[string]string{"SYSLOG_IDENTIFIER": "rmount"})
}
