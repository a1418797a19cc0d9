package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// probeJSON runs `probe --backend emulated --json` and reads the report.
func probeJSON(t *testing.T, wantCode int, env []string, args ...string) probeReport {
	t.Helper()
	o := invoke(t, env, append([]string{"probe", "--backend", "emulated", "--json"}, args...)...)
	require.Equal(t, wantCode, o.code, "%s%s", o.out, o.err)
	var report probeReport
	decoder := json.NewDecoder(strings.NewReader(o.out))
	decoder.DisallowUnknownFields()
	require.NoError(t, decoder.Decode(&report), o.out)
	require.False(t, decoder.More(), "one JSON object only: %s", o.out)
	return report
}

// Each fault of the emulated machine has its verdict, and what is kept of it decides what `run` does.
func TestProbeFaults(t *testing.T) {
	for _, c := range []struct {
		fault, there, back, detail string
		code                       int
		path                       string // of a run with these verdicts
	}{
		{"none", "ok", "ok", "", exitGood, "peer"},
		{"drop", "broken", "broken", "copy engine write", exitFinding, "internal"},
		{"mirror", "broken", "broken", "copy engine write", exitFinding, "internal"},
		{"delay", "broken", "broken", "messages", exitFinding, "internal"},
		{"bounce", "slow", "slow", "right, but copies at", exitFinding, "internal"},
		{"one-way", "broken", "ok", "copy engine write", exitFinding, "internal"},
		{"hang", "timeout", "timeout", "not done after 2s, so its process was ended", exitFinding, "internal"},
	} {
		t.Run(c.fault, func(t *testing.T) {
			dir := t.TempDir()
			args := []string{"--emulate", "peer", "--fault", c.fault, "--cache", dir}
			if c.fault == "hang" {
				args = append(args, "--timeout", "2s")
			}
			r := probeJSON(t, c.code, nil, args...)
			require.Len(t, r.Pairs, 2)
			assert.Equal(t, []string{c.there, c.back}, []string{r.Pairs[0].Verdict, r.Pairs[1].Verdict}, r.Pairs)
			assert.Contains(t, r.Pairs[0].Detail, c.detail)
			assert.Equal(t, c.code == exitGood, r.OK)
			assert.True(t, r.Simulated)
			assert.Equal(t, filepath.Join(dir, "peer-emulated.json"), r.Cache)
			run := runJSON(t, exitGood, nil, "--emulate", "peer", "--cache", dir, "--sizes", "8K", "--iters", "2")
			assert.Equal(t, c.path, run.Results[0].Path)
			if c.path != "peer" {
				assert.Contains(t, run.Results[0].Reason, "peer access is "+c.there+": device 0 to device 1, "+r.Pairs[0].Detail)
			}
		})
	}
}

func TestProbe(t *testing.T) {
	t.Run("the driver denies it", func(t *testing.T) {
		r := probeJSON(t, exitGood, nil)
		assert.Equal(t, "unsupported", r.Pairs[0].Verdict)
		assert.Equal(t, "the driver denies it", r.Pairs[0].Detail)
		assert.Empty(t, r.Cache)
		assert.Contains(t, r.Warnings, "the verdicts are kept nowhere: name a folder with --cache")
	})
	t.Run("numbers", func(t *testing.T) {
		dir := t.TempDir()
		r := probeJSON(t, exitGood, []string{"GGML_CUDA_AR_CACHE_DIR=" + dir}, "--emulate", "peer", "--devices", "2,0,5")
		require.Len(t, r.Pairs, 6)
		for _, p := range r.Pairs {
			assert.Equal(t, "ok", p.Verdict)
			assert.InDelta(t, 181, p.CopyGBs, 5)
			assert.Less(t, p.StagedGBs, 56.0)
			assert.Greater(t, p.LatencyMicros, 0.5)
		}
		assert.Equal(t, []int{2, 5}, []int{r.Pairs[1].From, r.Pairs[1].To})
		assert.FileExists(t, r.Cache)
	})
	t.Run("a fault never reaches the real cache", func(t *testing.T) {
		dir := t.TempDir()
		r := probeJSON(t, exitFinding, []string{"GGML_CUDA_AR_CACHE_DIR=" + dir}, "--emulate", "peer", "--fault", "drop", "--fault-pairs", "1-0")
		assert.Equal(t, []string{"ok", "broken"}, []string{r.Pairs[0].Verdict, r.Pairs[1].Verdict})
		assert.Empty(t, r.Cache)
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		assert.Empty(t, entries)
	})
	t.Run("text", func(t *testing.T) {
		o := invoke(t, nil, "probe", "--backend", "emulated", "--emulate", "peer", "--fault", "one-way", "--devices", "0,1")
		assert.Equal(t, exitFinding, o.code)
		for _, want := range []string{"from \\ to  0", "0          -   broken", "1          ok  -", "0 to 1", "note: the verdicts are kept nowhere"} {
			assert.Contains(t, o.out, want)
		}
		assert.Contains(t, o.err, "probing device 1 to device 0")
	})
	t.Run("one device", func(t *testing.T) {
		r := probeJSON(t, exitGood, nil, "--devices", "3")
		assert.Contains(t, r.Warnings, "1 device: there is no pair to probe")
	})
	t.Run("a folder that cannot be made", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "f")
		require.NoError(t, os.WriteFile(file, nil, 0o600))
		r := probeJSON(t, exitFailed, nil, "--cache", filepath.Join(file, "x"))
		assert.Contains(t, r.Error, "the verdicts could not be kept")
		assert.False(t, r.OK)
	})
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--backend", "cuda", "--emulate", "peer"}, "--emulate needs --backend emulated"},
		{[]string{"--fault", "mirror"}, "--fault needs --backend emulated"},
		{[]string{"--backend", "emulated", "--fault", "melt"}, "allowed: none, drop, delay, mirror, bounce, one-way, hang"},
		{[]string{"--backend", "emulated", "--fault-pairs", "0-1"}, "--fault-pairs needs --fault"},
		{[]string{"--backend", "emulated", "--fault", "drop", "--fault-pairs", "1-1"}, "--fault-pairs: \"1-1\" is not allowed"},
		{[]string{"--backend", "emulated", "--fault", "drop", "--fault-pairs", "1"}, "--fault-pairs: \"1\" is not allowed"},
		{[]string{"--devices", "0,0"}, "--devices names device 0 twice"},
		{[]string{"--timeout", "0s"}, "--timeout 0s is not allowed; allowed: 1ms to 1h0m0s"},
	} {
		requireRefused(t, invoke(t, nil, append([]string{"probe"}, c.args...)...), c.want)
	}
	// What only the devices can tell comes with what is known by then.
	o := invoke(t, nil, "probe", "--backend", "emulated", "--devices", "0,77")
	assert.Equal(t, exitFailed, o.code)
	assert.Contains(t, o.err, "there is no device 77")
}

// perf measures the path as any other, with the links' rate for its bound.
func TestPerfPeer(t *testing.T) {
	dir := t.TempDir()
	probeJSON(t, exitGood, nil, "--emulate", "peer", "--cache", dir, "--devices", "0,1,2")
	for _, ranks := range []string{"2", "3"} {
		o := invoke(t, nil, "perf", "--backend", "emulated", "--emulate", "peer", "--cache", dir, "--path", "peer", "-g", ranks,
			"-b", "1K", "-e", "4M", "-f", "64", "-n", "5", "-w", "1", "--json")
		require.Equal(t, exitGood, o.code, o.err)
		var r perfReport
		require.NoError(t, json.Unmarshal([]byte(o.out), &r))
		require.Len(t, r.Results, 3)
		for _, row := range r.Results {
			assert.Equal(t, "peer", row.Path)
			assert.Zero(t, row.Wrong)
			assert.Positive(t, row.PercentOfBound)
		}
		last := r.Results[2]
		assert.Equal(t, int64(4<<20), last.Bytes)
		if ranks == "2" { // 4 MiB at 376 GB/s, and what a copy costs beside
			assert.InDelta(t, (4<<20)/376e3+3, last.BoundUs, 8)
		}
		assert.Greater(t, last.PercentOfBound, 30.0)
	}
	o := invoke(t, nil, "perf", "--backend", "emulated", "--emulate", "peer", "--path", "peer", "-b", "1K", "-e", "1K")
	require.Equal(t, exitFailed, o.code)
	assert.Contains(t, o.err, "peer access not proven: run allreduce probe")
}
