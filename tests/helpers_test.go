//go:build !cuda

// Package tests builds programs outside this module, as its users do: vendored, against an installed library, in C, and
// after an edit of the C core. The tests of the packages themselves lie beside them. None of it runs with -tags cuda: the
// builds here choose their own tags, and one run of them is enough.
package tests

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// root is the module's folder.
func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("..")
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(dir, "go.mod"), "these tests need the sources beside them")
	return dir
}

// unavailable skips, or fails where skipping would hide something: on CI and with CUDA=required.
func unavailable(t *testing.T, format string, args ...any) {
	t.Helper()
	if os.Getenv("CI") != "" || os.Getenv("CUDA") == "required" {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

// need gives the path of a tool.
func need(t *testing.T, tool string) string {
	t.Helper()
	path, err := exec.LookPath(tool)
	if err != nil {
		unavailable(t, "%s is not installed", tool)
	}
	return path
}

// run runs a command and gives what it printed; it must exit with the code.
func run(t *testing.T, dir string, env []string, code int, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	if cmd.ProcessState == nil {
		t.Fatalf("%s: %v", name, err)
	}
	require.Equal(t, code, cmd.ProcessState.ExitCode(), "%s %s\n%s", name, strings.Join(args, " "), out.String())
	return out.String()
}

// consumer lays a module outside this one that uses it through a replace directive.
func consumer(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	source, err := os.ReadFile("testdata/consumer.go.txt")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "main.go"), source, 0o600))
	mod, err := os.ReadFile(filepath.Join(root(t), "go.mod"))
	require.NoError(t, err)
	// This module's requirements and checksums, so that no proxy is asked.
	text := strings.Replace(string(mod), "module gpu.example/allreduce", "module consumer.example/program", 1) +
		"\nrequire gpu.example/allreduce v0.0.0\n\nreplace gpu.example/allreduce => " + root(t) + "\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte(text), 0o600))
	sum, err := os.ReadFile(filepath.Join(root(t), "go.sum"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.sum"), sum, 0o600))
	return dir
}

// plain is the environment of a user's shell: no tags, flags or workspaces of the test run.
var plain = []string{"GOFLAGS=-mod=mod", "GOWORK=off", "GOPROXY=off", "CGO_ENABLED=1", "CGO_CXXFLAGS=-g -O2", "CGO_LDFLAGS=-g -O2"}

const consumerPrints = "internal 14 198\ncopy-engine 14 198\n"

// copyTree copies this module's sources, without what was built and without version control.
func copyTree(t *testing.T) string {
	t.Helper()
	from, to := root(t), t.TempDir()
	err := filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if entry.IsDir() && (rel == "build" || rel == ".git") {
			return fs.SkipDir
		}
		target := filepath.Join(to, rel)
		if entry.IsDir() {
			return os.MkdirAll(target, 0o700)
		}
		if !entry.Type().IsRegular() {
			return nil
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		return os.WriteFile(target, data, info.Mode().Perm()|0o200)
	})
	require.NoError(t, err)
	return to
}
