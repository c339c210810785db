// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agnivade/levenshtein"

	"rblk/internal/size"
	"rblk/wire"
)

// ErrSource: a SOURCE that cannot be understood.
var ErrSource = errors.New("bad source")

// Source names an export of a target, and how to use it:
//
//	rblk://HOST[:PORT][,HOST2[:PORT]…]/[EXPORT[/PATH]][?option=value&…]
//	rblk+unix://[EXPORT…]?socket=PATH
type Source struct {
	Addrs  []string // control addresses, host:port, tried in order; or one "unix:PATH"
	Export string   // empty: the target itself
	Path   string   // below the export, without a leading slash; for `get`
	Options
}

// Options of a Source, in its URI or behind -o.
type Options struct {
	Transport   string        // auto, verbs, tcp
	Access      string        // ro, rw, shared; empty: rw where the export allows it
	Force       bool          // fence the present writer
	Soft        time.Duration // fail I/O when the target is away for so long; 0: hard, wait
	Connections int           // data connections; 0: one a lane
	Cache       int64         // bytes; 0: default; -1: none
	CacheDir    string        // directory of the second tier, for datasets; empty: none
	CacheDisk   int64         // bytes that it may hold; 0: default
	Readahead   int64         // bytes of the largest window; -1: auto; 0: none
	TLSCA       string
	TLSCert     string
	TLSKey      string
	TokenFile   string
	Insecure    bool // plain HTTP beyond loopback
	Metrics     string
	LogLevel    string
	AllowOther  bool
	AllowRoot   bool
	NonEmpty    bool
}

// option sets one option from its value; "" is what a bare word has.
type option struct {
	value bool // wants a value
	set   func(*Options, string) error
}

func flagOption(set func(*Options)) option {
	return option{false, func(o *Options, _ string) error { set(o); return nil }}
}

func textOption(set func(*Options, string)) option {
	return option{true, func(o *Options, v string) error { set(o, v); return nil }}
}

func oneOf(set func(*Options, string), words ...string) option {
	return option{true, func(o *Options, v string) error {
		if !slices.Contains(words, v) {
			return fmt.Errorf("want %s", strings.Join(words, ", "))
		}
		set(o, v)
		return nil
	}}
}

var optionTable = map[string]option{
	"transport": oneOf(func(o *Options, v string) { o.Transport = v }, "auto", "verbs", "tcp"),
	"ro":        flagOption(func(o *Options) { o.Access = wire.AccessRead }),
	"rw":        flagOption(func(o *Options) { o.Access = wire.AccessWrite }),
	"shared":    flagOption(func(o *Options) { o.Access = wire.AccessShared }),
	"force":     flagOption(func(o *Options) { o.Force = true }),
	"hard":      flagOption(func(o *Options) { o.Soft = 0 }),
	"soft": {true, func(o *Options, v string) error {
		d, err := time.ParseDuration(v)
		if err != nil || d <= 0 {
			return errors.New("want a time such as 30s")
		}
		o.Soft = d
		return nil
	}},
	"connections": {true, func(o *Options, v string) error {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 || n > 64 {
			return errors.New("want 1 to 64")
		}
		o.Connections = n
		return nil
	}},
	"cache":      {true, func(o *Options, v string) (err error) { o.Cache, err = parseCache(v); return err }},
	"cache-dir":  textOption(func(o *Options, v string) { o.CacheDir = v }),
	"cache-disk": {true, func(o *Options, v string) (err error) { o.CacheDisk, err = size.Parse(v); return err }},
	"readahead":  {true, func(o *Options, v string) (err error) { o.Readahead, err = parseReadahead(v); return err }},

	"tls-ca":     textOption(func(o *Options, v string) { o.TLSCA = v }),
	"tls-cert":   textOption(func(o *Options, v string) { o.TLSCert = v }),
	"tls-key":    textOption(func(o *Options, v string) { o.TLSKey = v }),
	"token-file": textOption(func(o *Options, v string) { o.TokenFile = v }),
	"insecure":   flagOption(func(o *Options) { o.Insecure = true }),

	"metrics":     textOption(func(o *Options, v string) { o.Metrics = v }),
	"log-level":   oneOf(func(o *Options, v string) { o.LogLevel = v }, "debug", "info", "warn", "error"),
	"allow_other": flagOption(func(o *Options) { o.AllowOther = true }),
	"allow_root":  flagOption(func(o *Options) { o.AllowRoot = true }),
	"nonempty":    flagOption(func(o *Options) { o.NonEmpty = true }),
}

func parseCache(v string) (int64, error) {
	if v == "none" {
		return -1, nil
	}
	n, err := size.Parse(v)
	if err == nil && n < 1<<20 {
		err = errors.New("want none, or at least 1MiB")
	}
	return n, err
}

func parseReadahead(v string) (int64, error) {
	if v == "auto" {
		return -1, nil
	}
	return size.Parse(v)
}

// secretOptions must not stand where others can read them.
var secretOptions = []string{"token", "password", "secret", "key"}

func (o *Options) set(name, value string, given bool) error {
	opt, ok := optionTable[name]
	switch {
	case slices.Contains(secretOptions, name):
		return fmt.Errorf("%w: option %q: secrets do not belong in a URI or on a command line: use token-file= or tls-key= with a file", ErrSource, name)
	case !ok:
		return fmt.Errorf("%w: unknown option %q: did you mean %q?", ErrSource, name, nearest(name))
	case opt.value != (given && value != ""):
		if opt.value {
			return fmt.Errorf("%w: option %s needs a value: %s=…", ErrSource, name, name)
		}
		return fmt.Errorf("%w: option %s takes no value", ErrSource, name)
	}
	if err := opt.set(o, value); err != nil {
		return fmt.Errorf("%w: option %s=%s: %w", ErrSource, name, value, err)
	}
	return nil
}

func nearest(name string) string {
	best, least := "", 1<<30
	for known := range optionTable {
		if d := levenshtein.ComputeDistance(name, known); d < least || d == least && known < best {
			best, least = known, d
		}
	}
	return best
}

// WithOptions adds options as they stand behind -o: "a=b,c,d=e".
func (s Source) WithOptions(list string) (Source, error) {
	for part := range strings.SplitSeq(list, ",") {
		if part == "" {
			continue
		}
		name, value, given := strings.Cut(part, "=")
		if err := s.set(name, value, given); err != nil {
			return s, err
		}
	}
	return s, nil
}

// ParseSource reads a SOURCE. Errors match ErrSource and are one line.
func ParseSource(text string) (Source, error) {
	s := Source{Options: Options{Transport: "auto", Readahead: -1}}
	rest, ok := strings.CutPrefix(text, "rblk://")
	unixRest, isUnix := strings.CutPrefix(text, "rblk+unix://")
	if !ok && !isUnix {
		return s, fmt.Errorf("%w: %q: want rblk://HOST[:PORT]/EXPORT", ErrSource, text)
	}
	if isUnix {
		rest = "unix/" + unixRest
	}
	rest, query, _ := strings.Cut(rest, "?")
	hosts, path, _ := strings.Cut(rest, "/")
	if strings.Contains(hosts, "@") {
		return s, fmt.Errorf("%w: no user or password belongs in it: use token-file=", ErrSource)
	}
	text, _, _ = strings.Cut(text, "?") // as it is shown: a secret may stand in an option
	var err error
	if isUnix {
		path = strings.TrimPrefix(path, "/")
	}
	s.Export, s.Path, _ = strings.Cut(path, "/")
	if s.Export, err = url.PathUnescape(s.Export); err == nil {
		s.Path, err = url.PathUnescape(s.Path)
	}
	if err != nil {
		return s, fmt.Errorf("%w: %q: %w", ErrSource, text, err)
	}
	values, err := parseQuery(query)
	if err != nil {
		return s, fmt.Errorf("%w: %q: %w", ErrSource, text, err)
	}
	if isUnix {
		i := slices.IndexFunc(values, func(v [2]string) bool { return v[0] == "socket" })
		if i < 0 || values[i][1] == "" {
			return s, fmt.Errorf("%w: %q: want rblk+unix:///EXPORT?socket=PATH", ErrSource, text)
		}
		s.Addrs = []string{"unix:" + values[i][1]}
		values = slices.Delete(values, i, i+1)
	} else if s.Addrs, err = parseHosts(hosts); err != nil {
		return s, fmt.Errorf("%w: %q: %w", ErrSource, text, err)
	}
	for _, v := range values {
		if err := s.set(v[0], v[1], v[1] != ""); err != nil {
			return s, err
		}
	}
	return s, nil
}

// parseQuery keeps the order, in which later options win.
func parseQuery(q string) ([][2]string, error) {
	var out [][2]string
	for part := range strings.SplitSeq(q, "&") {
		if part == "" {
			continue
		}
		k, v, _ := strings.Cut(part, "=")
		k, err := url.QueryUnescape(k)
		if err != nil {
			return nil, err
		}
		if v, err = url.QueryUnescape(v); err != nil {
			return nil, err
		}
		out = append(out, [2]string{k, v})
	}
	return out, nil
}

func parseHosts(list string) ([]string, error) {
	var addrs []string
	for h := range strings.SplitSeq(list, ",") {
		host, port, err := net.SplitHostPort(h)
		if err != nil {
			host, port = h, strconv.Itoa(wire.DefaultControlPort)
			if inner, ok := strings.CutPrefix(h, "["); ok && strings.HasSuffix(inner, "]") {
				host = inner[:len(inner)-1]
			}
		}
		if !validHost(host) {
			return nil, fmt.Errorf("host %q: want HOST, HOST:PORT or [IPV6]:PORT", h)
		}
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
			return nil, fmt.Errorf("port %q: want 1 to 65535", port)
		}
		if host == "" {
			return nil, errors.New("the host is missing: rblk://HOST[:PORT]/EXPORT")
		}
		addrs = append(addrs, net.JoinHostPort(host, port))
	}
	return addrs, nil
}

// validHost takes what may be a name or an address; "" is for the caller.
func validHost(host string) bool {
	if strings.Contains(host, ":") {
		_, err := netip.ParseAddr(host)
		return err == nil
	}
	return !strings.ContainsFunc(host, func(r rune) bool { return r <= ' ' || strings.ContainsRune("%[]<>\"\\^`{|}\x7f", r) })
}

// String is the source without its options, as it may be shown and read again.
func (s Source) String() string {
	path := "/" + url.PathEscape(s.Export)
	if s.Path != "" {
		path += "/" + (&url.URL{Path: s.Path}).EscapedPath()
	}
	if len(s.Addrs) == 1 {
		if socket, ok := strings.CutPrefix(s.Addrs[0], "unix:"); ok {
			return "rblk+unix://" + path + "?socket=" + url.QueryEscape(socket)
		}
	}
	return "rblk://" + strings.Join(s.Addrs, ",") + path
}
