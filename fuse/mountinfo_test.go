// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseMountinfo(t *testing.T) {
	const text = `22 1 0:21 / /sys rw,nosuid shared:7 - sysfs sysfs rw
36 22 0:52 / /mnt/a\040b\134c\012 rw,nosuid,nodev shared:1 master:2 - fuse.rmount rblk://host/exp\040ort rw,user_id=1000
37 22 0:53 / /mnt/empty rw - tmpfs  rw
`
	got, err := parseMountinfo(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	want := []Info{
		{22, "0:21", "/sys", "sysfs", "sysfs", 0},
		{36, "0:52", "/mnt/a b\\c\n", FSType, "rblk://host/exp ort", 1000},
		{37, "0:53", "/mnt/empty", "tmpfs", "", 0},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for _, bad := range []string{"x", "x 1 0:1 / / rw - a b c", "1 1 0:1 / / rw", "1 1 0:1 / / rw - a"} {
		if _, err := parseMountinfo(strings.NewReader(bad)); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}

func FuzzParseMountinfo(f *testing.F) {
	f.Add("36 22 0:52 / /mnt/a\\040b rw shared:1 - fuse.rmount src rw")
	f.Fuzz(func(t *testing.T, s string) { parseMountinfo(strings.NewReader(s)) })
}

func TestMountPath(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir+"/point", 0o755); err != nil {
		t.Fatal(err)
	}
	for link, target := range map[string]string{"link": "point", "abs": dir + "/link", "loop": "loop"} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"point", "point/", "link", "abs", "x/../point"} {
		got, err := MountPath(dir + "/" + name)
		if err != nil || got != dir+"/point" {
			t.Errorf("%s: %s, %v", name, got, err)
		}
	}
	if got, err := MountPath(dir + "/none"); err != nil || got != dir+"/none" {
		t.Errorf("a path that does not exist: %s, %v", got, err)
	}
	if got, err := MountPath(dir + "/loop"); err == nil {
		t.Errorf("a loop gives %s", got)
	}
	t.Chdir(dir)
	if got, err := MountPath("point"); err != nil || got != dir+"/point" {
		t.Errorf("relative: %s, %v", got, err)
	}
}
