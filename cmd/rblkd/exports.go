// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"rblk/internal/size"
	"rblk/target"
)

// memoryList is the repeatable flag --memory.
type memoryList []target.MemoryConfig

func (l *memoryList) Set(text string) error { return l.add(text, true) }
func (l *memoryList) Type() string          { return "NAME=SIZE" }

func (l *memoryList) String() string {
	var parts []string
	for _, m := range *l {
		parts = append(parts, m.Name+"="+size.Format(m.Size))
	}
	return strings.Join(parts, " ")
}

// add parses NAME=SIZE[,hugepages=SIZE]. A name that is there already is a
// mistake in the same source, and settled in a weaker one.
func (l *memoryList) add(text string, same bool) error {
	m, err := parseMemory(text)
	if err != nil {
		return err
	}
	for _, have := range *l {
		if have.Name == m.Name {
			return twice(m.Name, same)
		}
	}
	*l = append(*l, m)
	return nil
}

func twice(name string, same bool) error {
	if same {
		return fmt.Errorf("export %s is given twice", name)
	}
	return nil
}

func parseMemory(text string) (m target.MemoryConfig, err error) {
	name, rest, ok := strings.Cut(text, "=")
	if !ok || name == "" {
		return m, fmt.Errorf("memory export %q: want NAME=SIZE, such as scratch=1GiB", text)
	}
	m.Name = name
	sizeText, opts, _ := strings.Cut(rest, ",")
	if m.Size, err = size.Parse(sizeText); err != nil {
		return m, fmt.Errorf("memory export %s: %w", name, err)
	}
	if m.Size == 0 {
		return m, fmt.Errorf("memory export %s: size must be above 0, such as %s=1GiB", name, name)
	}
	if opts == "" {
		return m, nil
	}
	for opt := range strings.SplitSeq(opts, ",") {
		key, value, _ := strings.Cut(opt, "=")
		if err := memoryOption(&m, key, value); err != nil {
			return m, fmt.Errorf("memory export %s: %w", name, err)
		}
	}
	return m, nil
}

// memoryKeys are what a memory export in the file may say.
var memoryKeys = []string{"size", "hugepages", "dir"}

func memoryOption(m *target.MemoryConfig, key, value string) (err error) {
	switch key {
	case "hugepages":
		m.HugePages, err = size.Parse(value)
		if err == nil && (m.HugePages <= 0 || m.HugePages&(m.HugePages-1) != 0) {
			err = fmt.Errorf("hugepages=%s: want a page size, 2MiB or 1GiB", value)
		}
		return err
	case "dir":
		m.Dir = value
		return nil
	case "persist":
		return fmt.Errorf("persist is not supported: memory outlives rblkd, not the host")
	}
	return unknownKey(key, "option", memoryKeys[1:])
}

// datasetList is the repeatable flag --dataset.
type datasetList []target.DatasetConfig

func (l *datasetList) Set(text string) error { return l.add(text, true) }
func (l *datasetList) Type() string          { return "NAME=DIR" }

func (l *datasetList) String() string {
	var parts []string
	for _, d := range *l {
		parts = append(parts, d.Name+"="+d.Path)
	}
	return strings.Join(parts, " ")
}

func (l *datasetList) add(text string, same bool) error {
	name, path, ok := strings.Cut(text, "=")
	if !ok || name == "" || path == "" {
		return fmt.Errorf("dataset export %q: want NAME=DIR, such as corpus=/srv/corpus", text)
	}
	for _, have := range *l {
		if have.Name == name {
			return twice(name, same)
		}
	}
	*l = append(*l, target.DatasetConfig{Name: name, Path: path})
	return nil
}
