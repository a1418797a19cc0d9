// Package docs holds no code: its tests keep README.md and the pages here in step with the library.
package docs

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
)

var update = flag.Bool("update", false, "write the generated tables into the pages")

const root = ".."

func page(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	if os.IsNotExist(err) {
		t.Skip("the sources are not here")
	}
	require.NoError(t, err)
	return string(text)
}

// requireBlock compares what lies between the markers of a name with want, or writes it there.
func requireBlock(t *testing.T, path, name, want string) {
	t.Helper()
	text := page(t, path)
	begin, end := "<!-- "+name+": begin (go test ./docs -update) -->\n", "<!-- "+name+": end -->"
	_, rest, found := strings.Cut(text, begin)
	require.True(t, found, "%s has no %q", path, begin)
	got, _, found := strings.Cut(rest, end)
	require.True(t, found, "%s has no %q", path, end)
	if *update {
		text = strings.Replace(text, begin+got, begin+want, 1)
		require.NoError(t, os.WriteFile(filepath.Join(root, path), []byte(text), 0o644))
		return
	}
	require.Equal(t, want, got, "%s: run go test ./docs -update", path)
}

// cell makes a text fit a table's cell.
func cell(text string) string { return strings.ReplaceAll(text, "|", "\\|") }

func TestVariables(t *testing.T) {
	var b strings.Builder
	b.WriteString("| variable | default | allowed | meaning | Config |\n| --- | --- | --- | --- | --- |\n")
	for _, v := range allreduce.Variables() {
		meaning := v.Help
		if v.NotYet != "" {
			meaning += " *No effect yet: " + v.NotYet + ".*"
		}
		field := v.Field
		if field != "" {
			field = "`" + field + "`"
		}
		allowed := strings.ReplaceAll(v.Allowed, "a byte count, K, M or G for 1024, 1024^2, 1024^3", "bytes")
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", v.Name, cell(v.Default), cell(allowed), cell(meaning), field)
	}
	requireBlock(t, "docs/multi-gpu.md", "variables", b.String())
}

// TestRoutes makes the table of defaults from a communicator's own.
func TestRoutes(t *testing.T) {
	for _, v := range allreduce.Variables() { // the defaults, whatever the shell has set
		t.Setenv(v.Name, "")
	}
	comm, err := allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, comm.Close()) }()
	var head, rule strings.Builder
	routes := comm.Stats().Routes
	for _, r := range routes {
		fmt.Fprintf(&head, " %s travels as |", r.Type)
		rule.WriteString(" --- |")
		require.Len(t, r.Bands, len(routes[0].Bands), "one table for all types")
	}
	var b strings.Builder
	fmt.Fprintf(&b, "| payload | path |%s\n| --- | --- |%s\n", head.String(), rule.String())
	from := int64(0)
	for i, band := range routes[0].Bands {
		size := "from " + allreduce.FormatBytes(from)
		switch {
		case band.MaxBytes == 0:
			size = "no elements"
		case band.MaxBytes < 1<<62 && from <= 1:
			size = "below " + allreduce.FormatBytes(band.MaxBytes+1)
		case band.MaxBytes < 1<<62:
			size += ", below " + allreduce.FormatBytes(band.MaxBytes+1)
		}
		from = band.MaxBytes + 1
		fmt.Fprintf(&b, "| %s | `%s` |", size, band.Path)
		for _, r := range routes {
			require.Equal(t, band.MaxBytes, r.Bands[i].MaxBytes, "one table for all types")
			require.Equal(t, band.Path, r.Bands[i].Path, "one table for all types")
			wire := r.Bands[i].Wire.String()
			if r.Bands[i].Wire == allreduce.TypeNone {
				wire = "-"
			}
			fmt.Fprintf(&b, " %s |", wire)
		}
		b.WriteString("\n")
	}
	requireBlock(t, "README.md", "routes", b.String())
	requireBlock(t, "docs/multi-gpu.md", "routes", b.String())
}

// goTool runs go in the module's root, or skips where there is no toolchain.
func goTool(t *testing.T, args ...string) (string, error) {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("no go here")
	}
	if _, err := os.Stat(filepath.Join(root, "go.mod")); err != nil {
		t.Skip("the sources are not here")
	}
	cmd := exec.Command("go", args...)
	cmd.Dir = root
	text, err := cmd.CombinedOutput()
	return string(text), err
}

const exampleProgram = `package main

import (
	"log"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
)

const n = 1000

func example(a0, a1 allreduce.Ptr, s0, s1 allreduce.Stream) error {
%s
	return err
}

func main() {
	gpu, err := device.Open(device.Emulated)
	if err != nil {
		log.Fatal(err)
	}
	var a [2]allreduce.Ptr
	var s [2]allreduce.Stream
	values := make([]float32, n)
	for d := range a {
		for i := range values {
			values[i] = float32(d+1)
		}
		if a[d], err = gpu.Malloc(d, 4*n); err == nil {
			err = gpu.CopyToDevice(d, a[d], device.Bytes(values))
		}
		if err != nil {
			log.Fatal(err)
		}
		if s[d], err = gpu.NewStream(d); err != nil {
			log.Fatal(err)
		}
	}
	if err := example(a[0], a[1], s[0], s[1]); err != nil {
		log.Fatal(err)
	}
	for d := range a {
		if err := gpu.Synchronize(d, s[d]); err != nil {
			log.Fatal(err)
		}
		if err := gpu.CopyToHost(d, device.Bytes(values), a[d]); err != nil {
			log.Fatal(err)
		}
		if values[0] != 3 || values[n-1] != 3 {
			log.Fatalf("device %%d has %%v, not 3", d, values[0])
		}
	}
}
`

// The README's example compiles and does what it says.
func TestReadmeExample(t *testing.T) {
	_, rest, found := strings.Cut(page(t, "README.md"), "```go\n")
	require.True(t, found)
	code, _, _ := strings.Cut(rest, "```")
	require.LessOrEqual(t, strings.Count(code, "\n"), 10, "a ten-line example")
	file := filepath.Join(t.TempDir(), "main.go")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, exampleProgram, code), 0o600))
	text, err := goTool(t, slices.Concat([]string{"run"}, tags, []string{file})...)
	require.NoError(t, err, text)
}

// The machine file of multi-gpu.md is one.
func TestMachineExample(t *testing.T) {
	_, rest, found := strings.Cut(page(t, "docs/multi-gpu.md"), "```json\n")
	require.True(t, found)
	code, _, _ := strings.Cut(rest, "```")
	file := filepath.Join(t.TempDir(), "machine.json")
	require.NoError(t, os.WriteFile(file, []byte(code), 0o600))
	machine, err := device.LoadMachine(file)
	require.NoError(t, err)
	require.Len(t, machine.Devices, 2)
}

// The reports of tools.md have the fields of real ones, no more and no less.
func TestReportExamples(t *testing.T) {
	for section, command := range map[string]string{
		"run":  "run --backend emulated --sizes 1K --iters 1 --json",
		"soak": "soak --backend emulated --sizes 1K --calls 1 --json",
	} {
		t.Run(section, func(t *testing.T) {
			_, rest, found := strings.Cut(page(t, "docs/tools.md"), "\n## "+section+"\n")
			require.True(t, found)
			_, rest, found = strings.Cut(rest, "```json\n")
			require.True(t, found)
			code, _, _ := strings.Cut(rest, "```")
			var documented, real any
			require.NoError(t, json.Unmarshal([]byte(code), &documented))
			text, err := goTool(t, slices.Concat([]string{"run"}, tags, strings.Fields("./cmd/allreduce "+command))...)
			require.NoError(t, err, text)
			require.NoError(t, json.Unmarshal([]byte(text), &real))
			require.Equal(t, shape(documented), shape(real))
		})
	}
}

// shape keeps field names and drops values; of a list it keeps the first element.
func shape(v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := map[string]any{}
		for name, field := range v {
			out[name] = shape(field)
		}
		return out
	case []any:
		if len(v) > 0 {
			return []any{shape(v[0])}
		}
		return []any{}
	}
	return nil
}

var link = regexp.MustCompile(`\]\(([^)#]+)(#[^)]*)?\)`)

func TestLinks(t *testing.T) {
	pages, err := filepath.Glob("*.md")
	require.NoError(t, err)
	for _, name := range append(pages, "../README.md") {
		for _, match := range link.FindAllStringSubmatch(page(t, filepath.Join("docs", name)), -1) {
			if target := match[1]; !strings.Contains(target, "://") {
				_, err := os.Stat(filepath.Join(filepath.Dir(name), target))
				require.NoError(t, err, "%s links to %s", name, target)
			}
		}
	}
}

// What only the command needs must not reach a program that imports the library.
func TestDependenciesOfTheLibrary(t *testing.T) {
	text, err := goTool(t, "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".", "./device")
	require.NoError(t, err, text)
	allowed := map[string]bool{
		"gpu.example/allreduce": true, "gpu.example/allreduce/device": true, "gpu.example/allreduce/internal/core": true,
		"gpu.example/allreduce/internal/launch": true, "gpu.example/allreduce/internal/rendezvous": true, "golang.org/x/sys/unix": true,
		"gpu.example/allreduce/internal/verdicts": true, "gpu.example/allreduce/internal/atomicfile": true,
		"gpu.example/allreduce/internal/nvml": true, "github.com/NVIDIA/go-nvml/pkg/dl": true, "github.com/NVIDIA/go-nvml/pkg/nvml": true,
	}
	for path := range strings.FieldsSeq(text) {
		require.True(t, allowed[path], "the library pulls in %s", path)
	}
}

// Every module that go.mod names directly has its line in architecture.md.
func TestDependenciesAreListed(t *testing.T) {
	listed := page(t, "docs/architecture.md")
	for line := range strings.Lines(page(t, "go.mod")) {
		line = strings.TrimSpace(line)
		if path, _, found := strings.Cut(line, " v"); found && !strings.Contains(line, "// indirect") {
			require.Contains(t, listed, strings.TrimPrefix(path, "require "), "docs/architecture.md, Dependencies")
		}
	}
}
