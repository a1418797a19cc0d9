//go:build !cuda

package tests

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// What only the command needs must not reach a program that imports the library.
func TestLibraryImports(t *testing.T) {
	out := run(t, root(t), []string{"GOFLAGS="}, 0, "go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", "gpu.example/allreduce")
	allowed := map[string]bool{
		"gpu.example/allreduce":               true,
		"gpu.example/allreduce/device":        true,
		"gpu.example/allreduce/internal/core": true,
		"gpu.example/allreduce/internal/nvml": true,

		"gpu.example/allreduce/internal/verdicts":   true,
		"gpu.example/allreduce/internal/atomicfile": true,
		"gpu.example/allreduce/internal/launch":     true,
		"gpu.example/allreduce/internal/rendezvous": true,

		"golang.org/x/sys/unix":              true,
		"github.com/NVIDIA/go-nvml/pkg/nvml": true,
		"github.com/NVIDIA/go-nvml/pkg/dl":   true,
	}
	for _, name := range strings.Fields(out) {
		assert.True(t, allowed[name], "%s reaches every program that imports the library", name)
	}
}

// One importer of "C" in this module, or there are two emulated worlds.
func TestOnlyCoreUsesCgo(t *testing.T) {
	out := run(t, root(t), []string{"GOFLAGS="}, 0, "go", "list", "-f", "{{if .CgoFiles}}{{.ImportPath}}{{end}}", "./...")
	assert.Equal(t, []string{"gpu.example/allreduce/internal/core"}, strings.Fields(out))
}

// device and internal/core stand below the root package, never the reverse.
func TestLayers(t *testing.T) {
	for name, banned := range map[string]string{
		"gpu.example/allreduce/internal/core":      "gpu.example/allreduce/device",
		"gpu.example/allreduce/device":             "gpu.example/allreduce",
		"gpu.example/allreduce/internal/reference": "gpu.example/allreduce",
	} {
		out := run(t, root(t), []string{"GOFLAGS="}, 0, "go", "list", "-deps", name)
		assert.NotContains(t, strings.Fields(out), banned, name)
	}
}
