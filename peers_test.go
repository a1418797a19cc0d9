package allreduce_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/reference"
	"gpu.example/allreduce/internal/testbackend"
	"gpu.example/allreduce/internal/testnccl"
	"gpu.example/allreduce/internal/verdicts"
)

const noNCCL = "/nonexistent/libnccl.so.2"

// peersMachine has n devices between which the driver grants peer access.
func peersMachine(n int) device.Machine {
	m := device.DefaultMachine(n)
	for a := range n {
		row := make([]bool, n)
		for b := range row {
			row[b] = a != b
		}
		m.Peer = append(m.Peer, row)
	}
	return m
}

// keepVerdicts writes what a probe of n emulated devices would have found: all ok but the pairs named, "0-1": "broken".
func keepVerdicts(t *testing.T, dir string, d device.Driver, n int, but map[string]string) {
	t.Helper()
	key, ok := verdicts.KeyOf(verdicts.EmulatedDriver)
	require.True(t, ok)
	require.NoError(t, os.RemoveAll(verdicts.Path(dir, "emulated"))) // pairs of an earlier file would stay
	var all []verdicts.Pair
	end := func(dev int) verdicts.Device {
		info, err := d.Info(dev)
		require.NoError(t, err)
		return verdicts.Device{UUID: info.UUID, BusID: info.BusID}
	}
	for a := range n {
		for b := range n {
			if a == b {
				continue
			}
			p := verdicts.Pair{From: end(a), To: end(b), Verdict: verdicts.OK, CopyGBs: 300, StoreGBs: 310, StagedGBs: 40, LatencyMicros: 1.5}
			if v, bad := but[fmt.Sprintf("%d-%d", a, b)]; bad {
				p.Verdict, p.Detail = v, "as a test has it"
			}
			if p.Verdict != "missing" {
				all = append(all, p)
			}
		}
	}
	require.NoError(t, verdicts.Write(verdicts.Path(dir, "emulated"), key, all))
}

// What each verdict, and each word of GGML_CUDA_P2P, makes of a megabyte.
func TestRouteByVerdict(t *testing.T) {
	lib := testnccl.Build(t)
	const hosted = "1048576 bytes reach GGML_CUDA_AR_CE_MIN_BYTES=512K: copy-engine"
	for _, c := range []struct {
		name    string
		ranks   int
		but     map[string]string
		config  allreduce.Config
		path    allreduce.Path
		reason  string
		warning string
	}{
		{"proven", 2, nil, allreduce.Config{}, allreduce.PathPeer, "peer access is proven: peer", ""},
		{"proven, three ranks", 3, nil, allreduce.Config{}, allreduce.PathPeer, "peer access is proven: peer", ""},
		{"proven, beyond the band, no NCCL", 2, nil, allreduce.Config{PeerMaxBytes: 4096}, allreduce.PathPeer,
			"peer access is proven and NCCL is not available", ""},
		{"proven, beyond the band", 2, nil, allreduce.Config{PeerMaxBytes: 4096, NCCLLib: lib}, allreduce.PathNCCL,
			"1048576 bytes exceed GGML_CUDA_AR_PEER_MAX_BYTES=4K: nccl", ""},
		{"proven, not wanted", 2, nil, allreduce.Config{P2P: allreduce.P2POff}, allreduce.PathCopyEngine, hosted + " (GGML_CUDA_P2P=0)", ""},
		{"proven, another path forced", 2, nil, allreduce.Config{Algorithm: allreduce.AlgorithmInternal}, allreduce.PathInternal,
			"GGML_CUDA_ALLREDUCE=internal: internal", ""},
		{"one pair broken", 2, map[string]string{"1-0": "broken"}, allreduce.Config{}, allreduce.PathCopyEngine,
			hosted + " (peer access is broken: device 1 to device 0, as a test has it, copies 300.0 GB/s, stores 310.0 GB/s, through the host 40.0 GB/s, a message 1.5 us)", ""},
		{"one pair of twelve slow", 4, map[string]string{"2-3": "slow"}, allreduce.Config{}, allreduce.PathCopyEngine,
			"(peer access is slow: device 2 to device 3, as", ""},
		{"the worst speaks", 3, map[string]string{"0-1": "slow", "2-1": "timeout", "1-2": "inconclusive"}, allreduce.Config{},
			allreduce.PathCopyEngine, "(peer access is timeout: device 2 to device 1, ", ""},
		{"and says how many there are", 3, map[string]string{"0-1": "slow", "2-1": "timeout", "1-2": "inconclusive"}, allreduce.Config{},
			allreduce.PathCopyEngine, "(3 of 6 pairs are not ok)", ""},
		{"unsupported", 2, map[string]string{"0-1": "unsupported", "1-0": "unsupported"}, allreduce.Config{}, allreduce.PathCopyEngine,
			"(peer access is unsupported: device 0 to device 1, ", ""},
		{"broken, NCCL there: still through the host", 2, map[string]string{"0-1": "broken"}, allreduce.Config{NCCLLib: lib},
			allreduce.PathCopyEngine, "(peer access is broken: ", ""},
		{"one pair not probed", 2, map[string]string{"0-1": "missing"}, allreduce.Config{}, allreduce.PathCopyEngine,
			hosted + " (peer access not proven: run allreduce probe)", ""},
		{"one pair not probed, NCCL there", 2, map[string]string{"0-1": "missing"}, allreduce.Config{NCCLLib: lib}, allreduce.PathNCCL,
			"peer access not proven: run allreduce probe", ""},
		{"trusted, proven", 2, nil, allreduce.Config{P2P: allreduce.P2PTrust}, allreduce.PathPeer, "peer access is proven: peer", ""},
		{"trusted, not probed", 2, map[string]string{"0-1": "missing"}, allreduce.Config{P2P: allreduce.P2PTrust}, allreduce.PathPeer,
			"peer access is trusted by GGML_CUDA_P2P=1: peer", "but nothing has proven it"},
		{"trusted, broken", 2, map[string]string{"0-1": "broken"}, allreduce.Config{P2P: allreduce.P2PTrust}, allreduce.PathPeer,
			"peer access is trusted by GGML_CUDA_P2P=1: peer", "but a probe found it broken: device 0 to device 1, as a test has it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			testbackend.Emulated(t, peersMachine(4), func(t *testing.T, d device.Driver) {
				dir := t.TempDir()
				keepVerdicts(t, dir, d, 4, c.but)
				c.config.CacheDir, c.config.Ranks = dir, c.ranks
				if c.config.NCCLLib == "" {
					c.config.NCCLLib = noNCCL
				}
				r := newRig(t, d, c.config)
				route := r.comm.Route(1<<20, allreduce.F32, allreduce.Sum)
				assert.Equal(t, c.path, route.Path, route.Reason)
				assert.Contains(t, route.Reason, c.reason)
				warnings := strings.Join(r.comm.Stats().Warnings, "\n")
				assert.Contains(t, warnings, c.warning)
				if c.warning == "" {
					assert.NotContains(t, warnings, "GGML_CUDA_P2P")
				}
				if c.path == allreduce.PathPeer && c.config.PeerMaxBytes == 0 {
					for _, count := range []int{5, 1 << 13, 1 << 18} {
						p := r.setUp(job{count: count, kind: reference.Normal, seed: 5})
						require.Equal(t, allreduce.PathPeer, p.path)
						require.NoError(t, r.runFallible(p))
						r.check(p)
					}
				}
			})
		})
	}
}

func script(t *testing.T, body string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "command")
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+body+"\n"), 0o700))
	return path
}

// Emulated devices have verdicts only where a folder was given, and no probe is ever started for them.
func TestEmulatedVerdictsAreNotLookedFor(t *testing.T) {
	testbackend.Emulated(t, peersMachine(2), func(t *testing.T, d device.Driver) {
		home := t.TempDir()
		dir := filepath.Join(home, "allreduce")
		keepVerdicts(t, dir, d, 2, nil)
		t.Setenv("XDG_CACHE_HOME", home)
		ran := filepath.Join(home, "ran")
		config := allreduce.Config{Ranks: 2, NCCLLib: noNCCL, ProbeCommand: script(t, "touch "+ran)}
		r := newRig(t, d, config)
		assert.Contains(t, r.comm.Route(1<<20, allreduce.F32, allreduce.Sum).Reason, "peer access not proven")
		assert.NoFileExists(t, ran)
		t.Setenv("GGML_CUDA_AR_CACHE_DIR", dir)
		r = newRig(t, d, config)
		assert.Equal(t, allreduce.PathPeer, r.comm.Route(1<<20, allreduce.F32, allreduce.Sum).Path)
	})
}

// A damaged file, or one of another boot, driver or slot, is as good as none.
func TestVerdictsThatCannotBeUsed(t *testing.T) {
	testbackend.Emulated(t, peersMachine(2), func(t *testing.T, d device.Driver) {
		dir := t.TempDir()
		path := verdicts.Path(dir, "emulated")
		for _, change := range []func(string) string{
			func(s string) string { return s[:len(s)/2] },
			func(s string) string { return strings.Replace(s, verdicts.BootID(), "another", 1) },
			func(s string) string { return strings.Replace(s, `"emulated"`, `"550.1"`, 1) },
			func(s string) string { return strings.ReplaceAll(s, "ffff:01:00.0", "ffff:09:00.0") },
			func(s string) string { return strings.ReplaceAll(s, "GPU-e", "GPU-f") },
		} {
			keepVerdicts(t, dir, d, 2, nil)
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			changed := change(string(text))
			require.NotEqual(t, string(text), changed)
			require.NoError(t, os.WriteFile(path, []byte(changed), 0o600))
			r := newRig(t, d, allreduce.Config{Ranks: 2, CacheDir: dir, NCCLLib: noNCCL})
			assert.Contains(t, r.comm.Route(1<<20, allreduce.F32, allreduce.Sum).Reason, "peer access not proven")
		}
	})
}

func TestForcedPeer(t *testing.T) {
	testbackend.Emulated(t, peersMachine(2), func(t *testing.T, d device.Driver) {
		dir := t.TempDir()
		config := allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: 2, CacheDir: dir, Algorithm: allreduce.AlgorithmPeer}
		_, err := allreduce.New(config)
		require.ErrorIs(t, err, allreduce.ErrUnsupported)
		require.ErrorContains(t, err, "GGML_CUDA_ALLREDUCE=peer cannot be had here: peer access not proven: run allreduce probe")
		keepVerdicts(t, dir, d, 2, map[string]string{"0-1": "slow"})
		_, err = allreduce.New(config)
		require.ErrorContains(t, err, "GGML_CUDA_ALLREDUCE=peer cannot be had here: peer access is slow: device 0 to device 1")
		keepVerdicts(t, dir, d, 2, nil)
		r := newRig(t, d, config)
		assert.Equal(t, allreduce.PathPeer, r.comm.Route(1<<30, allreduce.F32, allreduce.Sum).Path)
	})
	testbackend.Emulated(t, device.DefaultMachine(2), func(t *testing.T, _ device.Driver) {
		_, err := allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: 2, Algorithm: allreduce.AlgorithmPeer})
		require.ErrorContains(t, err, "the driver denies peer access")
	})
}

// NCCL would use the very access that was found broken: it is told not to, and refused where it is too late for that.
func TestBrokenPeersAndNCCL(t *testing.T) {
	const alone = "AR_TEST_ALONE"
	lib := testnccl.Build(t)
	if os.Getenv(alone) == "" { // the variable is the whole process's, and another test may have had it set
		self, err := os.Executable()
		require.NoError(t, err)
		cmd := exec.Command(self, "-test.run=^TestBrokenPeersAndNCCL$")
		cmd.Env = append(os.Environ(), alone+"=1")
		text, err := cmd.CombinedOutput()
		require.NoError(t, err, string(text))
		return
	}
	testbackend.Emulated(t, peersMachine(2), func(t *testing.T, d device.Driver) {
		dir := t.TempDir()
		libs := t.TempDir()
		text, err := os.ReadFile(lib)
		require.NoError(t, err)
		second, link := filepath.Join(libs, "second.so"), filepath.Join(libs, "link.so")
		require.NoError(t, os.WriteFile(second, text, 0o600))
		require.NoError(t, os.Symlink(second, link))
		nccl := func(verdict, lib string) string {
			keepVerdicts(t, dir, d, 2, map[string]string{"0-1": verdict})
			c, err := allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: 2, CacheDir: dir, NCCLLib: lib,
				Algorithm: allreduce.AlgorithmNCCL})
			if err != nil {
				return err.Error()
			}
			require.NoError(t, c.Close())
			return ""
		}
		assert.Empty(t, nccl("ok", lib))
		assert.Empty(t, nccl("slow", lib), "right, so NCCL may")
		const late = "was already in use in this process without NCCL_P2P_DISABLE=1"
		for _, verdict := range []string{"broken", "timeout"} {
			assert.Contains(t, nccl(verdict, lib), late)
		}
		assert.Empty(t, nccl("ok", lib))
		assert.Empty(t, nccl("broken", second), "a library that nobody has used yet")
		assert.Contains(t, nccl("broken", lib), late, "the variable is set by now, but this one has not read it")
		assert.Empty(t, nccl("broken", link), "the second by another name")
	})
}
