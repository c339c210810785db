// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/agnivade/levenshtein"
	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/spf13/pflag"
)

// at is a mistake at a line of the file.
func at(file string, n ast.Node, format string, args ...any) error {
	return fmt.Errorf("%s:%d: %w", file, n.GetToken().Position.Line, fmt.Errorf(format, args...))
}

// fromFile sets what the file says and nothing stronger did. Every value goes
// through its flag, so that both are read and refused alike.
func (s *settings) fromFile(file string, text []byte, given map[string]bool) error {
	top, err := parseYAML(file, text)
	if err != nil {
		return err
	}
	for _, kv := range top {
		key := scalar(kv.Key)
		f := s.flags.Lookup(key)
		if f == nil || key == "config" || key == "help" {
			return at(file, kv.Key, "%w", unknownKey(key, "key", s.keys()))
		}
		if err := s.fromNode(file, f, kv.Value, given[key]); err != nil {
			return err
		}
	}
	return nil
}

// keys are the settings that a file may hold.
func (s *settings) keys() []string {
	var keys []string
	s.flags.VisitAll(func(f *pflag.Flag) {
		if f.Name != "config" && f.Name != "help" && f.Name != "json" {
			keys = append(keys, f.Name)
		}
	})
	return keys
}

// fromNode sets one setting; given: a stronger source has.
func (s *settings) fromNode(file string, f *pflag.Flag, n ast.Node, given bool) error {
	switch f.Name {
	case "memory":
		return s.exports(file, f, n, "size", memoryKeys)
	case "dataset":
		return s.exports(file, f, n, "path", []string{"path"})
	}
	if given {
		return nil
	}
	values, err := scalars(file, f.Name, n)
	if err != nil {
		return err
	}
	list, isList := f.Value.(pflag.SliceValue)
	switch {
	case isList:
		err = list.Replace(values)
	case len(values) != 1:
		err = errors.New("want one value")
	default:
		err = f.Value.Set(values[0])
	}
	if err != nil {
		return at(file, n, "%s: %w", f.Name, err)
	}
	return nil
}

// exports reads a map of names; main is the key that each must have, and that a
// plain value stands for.
func (s *settings) exports(file string, f *pflag.Flag, n ast.Node, main string, known []string) error {
	m, err := mapping(file, n)
	if err != nil {
		return err
	}
	for _, kv := range m {
		name := scalar(kv.Key)
		if isScalar(kv.Value) {
			if err := s.set(f, name+"="+scalar(kv.Value)); err != nil {
				return at(file, kv.Value, "%w", err)
			}
			continue
		}
		fields, err := mapping(file, kv.Value)
		if err != nil {
			return err
		}
		value, opts := "", ""
		for _, field := range fields {
			key := scalar(field.Key)
			if !slices.Contains(known, key) {
				return at(file, field.Key, "%w", unknownKey(key, "key", known))
			}
			if !isScalar(field.Value) {
				return at(file, field.Value, "%s: want one value", key)
			}
			if key == main {
				value = scalar(field.Value)
			} else {
				opts += "," + key + "=" + scalar(field.Value)
			}
		}
		if value == "" {
			return at(file, kv.Key, "%s export %s: %s is missing", f.Name, name, main)
		}
		if err := s.set(f, name+"="+value+opts); err != nil {
			return at(file, kv.Key, "%w", err)
		}
	}
	return nil
}

// parseYAML reads one document that is a map.
func parseYAML(file string, text []byte) ([]*ast.MappingValueNode, error) {
	f, err := parser.ParseBytes(text, 0)
	var y yaml.Error
	if errors.As(err, &y) && y.GetToken() != nil {
		return nil, fmt.Errorf("%s:%d: %s", file, y.GetToken().Position.Line, oneLine(y.GetMessage()))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %s", file, oneLine(err.Error()))
	}
	if len(f.Docs) == 0 || f.Docs[0].Body == nil {
		return nil, nil
	}
	if len(f.Docs) > 1 {
		return nil, fmt.Errorf("%s: more than one YAML document", file)
	}
	return mapping(file, f.Docs[0].Body)
}

func mapping(file string, n ast.Node) ([]*ast.MappingValueNode, error) {
	switch n := n.(type) {
	case *ast.MappingNode:
		return n.Values, nil
	case *ast.MappingValueNode:
		return []*ast.MappingValueNode{n}, nil
	case *ast.NullNode, *ast.CommentGroupNode:
		return nil, nil
	}
	return nil, at(file, n, "want a map of keys and values")
}

func isScalar(n ast.Node) bool {
	switch n.(type) {
	case *ast.StringNode, *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.LiteralNode:
		return true
	}
	return false
}

// scalar is a node's text as it was written, less its quotes.
func scalar(n ast.Node) string {
	switch n := n.(type) {
	case *ast.StringNode:
		return n.Value
	case *ast.LiteralNode:
		return n.Value.Value
	}
	return n.GetToken().Value
}

// scalars are the values of a list, or the one value.
func scalars(file, key string, n ast.Node) ([]string, error) {
	if isScalar(n) {
		return []string{scalar(n)}, nil
	}
	seq, ok := n.(*ast.SequenceNode)
	if !ok {
		return nil, at(file, n, "%s: want a value", key)
	}
	var values []string
	for _, v := range seq.Values {
		if !isScalar(v) {
			return nil, at(file, v, "%s: want plain values", key)
		}
		values = append(values, scalar(v))
	}
	return values, nil
}

// unknownKey names the nearest valid one.
func unknownKey(key, what string, known []string) error {
	nearest := slices.MinFunc(known, func(a, b string) int {
		return levenshtein.ComputeDistance(key, a) - levenshtein.ComputeDistance(key, b)
	})
	if levenshtein.ComputeDistance(key, nearest) <= 1+len(key)/3 {
		return fmt.Errorf("unknown %s %q: did you mean %q?", what, key, nearest)
	}
	return fmt.Errorf("unknown %s %q: there is %s", what, key, strings.Join(known, ", "))
}
