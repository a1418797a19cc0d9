//go:build !cuda

package tests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Go's build cache does not watch the files that internal/core includes from csrc. What make passes (scripts/env.sh,
// go_env) must make it see an edited kernel.
func TestEditedKernelIsSeen(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles the C core twice")
	}
	t.Parallel()
	need(t, "bash")
	dir := copyTree(t)
	program := filepath.Join(dir, "cmd", "stale")
	require.NoError(t, os.MkdirAll(program, 0o700))
	source, err := os.ReadFile("testdata/consumer.go.txt")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(program, "main.go"), source, 0o600))
	reduce := func() string {
		return run(t, dir, append(plain, "CUDA=0"), 0, "bash", "-c", ". scripts/env.sh && go_env emulated && go run ./cmd/stale")
	}
	before := reduce()
	assert.Contains(t, before, consumerPrints)

	edited := 0
	kernels, err := filepath.Glob(filepath.Join(dir, "csrc", "kernels", "*"))
	require.NoError(t, err)
	for _, kernel := range kernels {
		text, err := os.ReadFile(kernel)
		require.NoError(t, err)
		edited += strings.Count(string(text), "add_rn(")
		require.NoError(t, os.WriteFile(kernel, []byte(strings.ReplaceAll(string(text), "add_rn(", "div_rn(")), 0o600))
	}
	require.Positive(t, edited, "the kernels add with add_rn")
	after := reduce()
	assert.NotContains(t, after, "14 198", "7/7 and 99/99 are 1")
	assert.Contains(t, after, "internal 1 1\n")
	assert.NotEqual(t, before[strings.Index(before, "hash"):], after[strings.Index(after, "hash"):])
}
