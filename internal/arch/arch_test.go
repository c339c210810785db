// SPDX-License-Identifier: Apache-2.0

// Package arch holds no code: its tests enforce the structure that
// docs/architecture.md describes.
package arch

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "rblk/"

// arrows lists, for each package of ours, which packages of ours it may import.
// Packages below internal/ are open to all and import nothing but each other.
// Test files are exempt.
var arrows = map[string][]string{
	"rdma":    {},
	"wire":    {},
	"volume":  {},
	"dataset": {},

	"rdma/tcp":      {"rdma"},
	"rdma/verbs":    {"rdma"},
	"rdma/faulty":   {"rdma"},
	"rdma/rdmatest": {"rdma"},

	"initiator": {"volume", "wire", "dataset", "rdma"},
	"target":    {"wire", "dataset", "rdma"},

	"cache":           {"volume"},
	"cache/cachetest": {"cache", "volume"},
	"cache/cachesim":  {"cache"},

	"fuse": {"cache", "volume", "dataset"},
	"nbd":  {"cache", "volume"},

	"cmd/rblkd":  {"target", "wire", "dataset", "rdma", "rdma/tcp", "rdma/verbs"},
	"cmd/rmount": {"fuse", "nbd", "cache", "initiator", "wire", "dataset", "volume", "rdma", "rdma/tcp", "rdma/verbs"},
}

type pkg struct {
	ImportPath string
	Imports    []string
	CgoFiles   []string
}

func list(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-tags", "verbs", "-json=ImportPath,Imports,CgoFiles", "./...")
	cmd.Dir = root(t)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v: %s", err, stderr.String())
	}
	var pkgs []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}

func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestImportsPointDown(t *testing.T) {
	seen := 0
	for _, p := range list(t) {
		name := strings.TrimPrefix(p.ImportPath, module)
		if strings.HasPrefix(name, "test/") {
			continue // wiring for tests
		}
		allowed, known := arrows[name]
		internal := strings.HasPrefix(name, "internal/")
		if !known && !internal {
			t.Errorf("package %s has no row in the table of arrows", name)
			continue
		}
		seen++
		for _, imp := range p.Imports {
			dep, ours := strings.CutPrefix(imp, module)
			if !ours || strings.HasPrefix(dep, "internal/") || slices.Contains(allowed, dep) {
				continue
			}
			t.Errorf("%s imports %s: the arrows of docs/architecture.md do not allow it", name, dep)
		}
	}
	if seen < 10 {
		t.Fatalf("only %d packages seen: the test looks at the wrong tree", seen)
	}
}

func TestOnlyVerbsUsesCgo(t *testing.T) {
	for _, p := range list(t) {
		if len(p.CgoFiles) > 0 && p.ImportPath != module+"rdma/verbs" {
			t.Errorf("%s uses cgo (%v); only rdma/verbs may", p.ImportPath, p.CgoFiles)
		}
	}
}

// TestSPDX: every source file says its licence in one line near its top.
func TestSPDX(t *testing.T) {
	const line = "SPDX-License-Identifier: Apache-2.0"
	n := 0
	err := filepath.WalkDir(root(t), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); strings.HasPrefix(name, ".") && name != ".ci" || name == "testdata" || name == "bin" {
				return filepath.SkipDir
			}
			return nil
		}
		switch filepath.Ext(path) {
		case ".go", ".c", ".h", ".sh", ".mk", ".py":
		default:
			if base := d.Name(); base != "Makefile" && base != "run" {
				return nil
			}
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		n++
		head := text[:min(len(text), 200)]
		if !bytes.Contains(head, []byte(line)) {
			t.Errorf("%s: no %q near its top", path, line)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if n < 20 {
		t.Fatalf("only %d files looked at", n)
	}
}
