package allreduce

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"gpu.example/allreduce/internal/verdicts"
)

// The command is asked for the devices and the folder of the communicator; a finding is no failure.
func TestProbeCommand(t *testing.T) {
	dir := t.TempDir()
	said := filepath.Join(dir, "said")
	c := &verdictCache{path: verdicts.Path(dir, "cuda"), dir: dir, backend: BackendCUDA, devices: []int32{0, 2, 3}}
	for body, want := range map[string]string{
		`echo "$@" >` + said: "",
		"exit 1":             "",
		"echo first >&2; echo no GPU >&2; exit 2": "probe failed (exit status 2): no GPU",
		"kill -9 $$": "probe failed (signal: killed)",
	} {
		command := filepath.Join(dir, "command")
		require.NoError(t, os.WriteFile(command, []byte("#!/bin/sh\n"+body+"\n"), 0o700))
		got := c.probe(t.Context(), &settings{probeCommand: command})
		if want == "" {
			assert.Empty(t, got)
			continue
		}
		assert.Contains(t, got, want)
	}
	text, err := os.ReadFile(said)
	require.NoError(t, err)
	assert.Equal(t, "probe --backend cuda --devices 0,2,3 --cache "+dir+"\n", string(text))
	assert.Contains(t, c.probe(t.Context(), &settings{probeCommand: "/nonexistent/command"}), "probe failed")

	t.Setenv("PATH", dir)
	assert.Contains(t, c.probe(t.Context(), &settings{}), "run allreduce probe")
	require.NoError(t, os.Rename(filepath.Join(dir, "command"), filepath.Join(dir, "allreduce")))
	assert.Equal(t, filepath.Join(dir, "allreduce"), findProbeCommand(""))
}

// Where a probe may start: GPUs, where its answer counts.
func TestMayProbe(t *testing.T) {
	for _, c := range []struct {
		backend Backend
		s       settings
		want    bool
	}{
		{BackendCUDA, settings{p2p: P2PAuto, algorithm: AlgorithmAuto}, true},
		{BackendCUDA, settings{p2p: P2PAuto, algorithm: AlgorithmPeer}, true},
		{BackendCUDA, settings{p2p: P2PAuto, algorithm: AlgorithmNCCL}, false},
		{BackendCUDA, settings{p2p: P2PTrust, algorithm: AlgorithmAuto}, false},
		{BackendEmulated, settings{p2p: P2PAuto, algorithm: AlgorithmAuto}, false},
	} {
		assert.Equal(t, c.want, (&verdictCache{backend: c.backend}).mayProbe(&c.s))
	}
}
