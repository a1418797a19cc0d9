package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/testbackend"
)

// few keeps the tests quick; the sizes cross the border of the copy engines.
var few = []string{"--iters", "4"}

func paths(report runReport) []string {
	var list []string
	for _, r := range report.Results {
		list = append(list, r.Path)
	}
	return list
}

func requireGood(t *testing.T, report runReport) {
	t.Helper()
	require.True(t, report.OK)
	require.Empty(t, report.Error)
	require.NotEmpty(t, report.Results)
	for _, r := range report.Results {
		require.True(t, r.RanksEqual, "%+v", r)
		require.Zero(t, r.Wrong, "%+v", r)
	}
}

func TestRunDefaults(t *testing.T) {
	report := runJSON(t, exitGood, nil, few...)
	requireGood(t, report)
	require.Equal(t, "emulated", report.Backend)
	require.True(t, report.Simulated)
	require.False(t, report.Graph)
	require.EqualValues(t, 1, report.Seed)
	require.Equal(t, 2, report.Ranks)
	require.Empty(t, report.Warnings)
	require.Equal(t, []string{"internal", "internal", "copy-engine", "copy-engine"}, paths(report))

	require.Len(t, report.Devices, 2)
	for i, d := range report.Devices {
		require.Equal(t, i, d.Index)
		require.Equal(t, []int{i}, d.Ranks)
		require.NotEmpty(t, d.Name)
		require.NotEmpty(t, d.UUID)
		require.NotEmpty(t, d.BusID)
		require.True(t, d.Simulated)
		require.Len(t, d.Peers, 1)
		require.False(t, d.Peers[0].CanAccess)
	}
	for i, bytes := range []int64{1 << 10, 64 << 10, 512 << 10, 16 << 20} {
		r := report.Results[i]
		require.Equal(t, bytes, r.Bytes)
		require.Equal(t, bytes/4, r.Count)
		require.Equal(t, "f32", r.Type)
		require.NotEmpty(t, r.Reason)
		require.Positive(t, r.TimeUs)
		require.Positive(t, r.AlgbwGBs)
		require.InDelta(t, r.AlgbwGBs, r.BusbwGBs, 1e-9) // two ranks: 2*(N-1)/N is 1
		require.InEpsilon(t, float64(bytes)/r.TimeUs/1e3, r.AlgbwGBs, 0.01)
	}
	require.Equal(t, "f32", report.Results[0].Wire)
	require.Equal(t, "bf16", report.Results[3].Wire)

	held := map[string]int{}
	for _, m := range report.Memory {
		held[m.Path]++
		if m.Path == "copy-engine" {
			require.LessOrEqual(t, m.OnGPU, int64(16<<20))
			require.LessOrEqual(t, m.Pinned, int64(8<<20))
		}
	}
	require.Equal(t, map[string]int{"internal": 2, "copy-engine": 2}, held)
}

// What the issue names, field by field: scripts depend on it.
func TestRunJSONFields(t *testing.T) {
	o := invoke(t, nil, "run", "--backend", "emulated", "--json", "--sizes", "1K", "--iters", "2")
	require.Equal(t, exitGood, o.code, o.err)
	var report map[string]any
	require.NoError(t, json.Unmarshal([]byte(o.out), &report))
	for _, field := range []string{"backend", "simulated", "graph", "seed", "ranks", "devices", "results", "memory", "warnings", "ok"} {
		require.Contains(t, report, field)
	}
	require.Equal(t, []any{}, report["warnings"], "an empty list, not null")
	result := report["results"].([]any)[0].(map[string]any)
	for _, field := range []string{"bytes", "count", "type", "path", "reason", "wire", "time_us", "algbw_gbs", "busbw_gbs", "ranks_equal", "wrong"} {
		require.Contains(t, result, field)
	}
	dev := report["devices"].([]any)[0].(map[string]any)
	for _, field := range []string{"index", "name", "uuid", "bus_id", "pcie_gen_max", "pcie_width_max", "p2p"} {
		require.Contains(t, dev, field)
	}
}

func TestRunNoLargeNoMemory(t *testing.T) {
	report := runJSON(t, exitGood, nil, "--sizes", "1K,508K", "--iters", "2")
	requireGood(t, report)
	for _, m := range report.Memory {
		require.Equal(t, "internal", m.Path, "the copy engines' memory comes with the first large reduction")
	}
}

func TestRunCounts(t *testing.T) {
	report := runJSON(t, exitGood, nil, "--counts", "0,1,7", "--iters", "5")
	requireGood(t, report)
	require.Equal(t, []string{"none", "internal", "internal"}, paths(report))
	require.Equal(t, "none", report.Results[0].Wire)
	require.EqualValues(t, 0, report.Results[0].Bytes)
	require.Zero(t, report.Results[0].AlgbwGBs)
	require.EqualValues(t, 28, report.Results[2].Bytes)
}

func TestRunEverythingThroughTheEngines(t *testing.T) {
	report := runJSON(t, exitGood, []string{"GGML_CUDA_AR_CE_MIN_BYTES=1"}, "--counts", "0,1,7,4096,300001", "--iters", "3")
	requireGood(t, report)
	require.Equal(t, []string{"none", "copy-engine", "copy-engine", "copy-engine", "copy-engine"}, paths(report))
}

func TestRunWithoutTheEngines(t *testing.T) {
	report := runJSON(t, exitGood, []string{"GGML_CUDA_AR_CE=0"}, few...)
	requireGood(t, report)
	require.Equal(t, []string{"internal", "internal", "internal", "internal"}, paths(report))
	for _, r := range report.Results {
		if r.Bytes >= 512<<10 {
			require.Contains(t, r.Reason, "GGML_CUDA_AR_CE=0")
		}
	}
}

func TestRunInputs(t *testing.T) {
	sizes := []string{"--sizes", "4,4K,200K,1M", "--iters", "4", "--seed", "7"}
	for _, extra := range [][]string{
		{"--input", "exact"}, {"--input", "special"}, {"--in-place"}, {"--op", "avg"}, {"--absent", "1"}, {"--absent", "0,1"},
		{"--in-place", "--absent", "0", "--input", "special"}, {"--ranks", "1"},
	} {
		t.Run(strings.Join(extra, " "), func(t *testing.T) {
			requireGood(t, runJSON(t, exitGood, nil, append(extra, sizes...)...))
		})
	}
	report := runJSON(t, exitGood, nil, append([]string{"--absent", "1"}, sizes...)...)
	require.Equal(t, []int{1}, report.Absent)
}

func TestRunWires(t *testing.T) {
	for _, wire := range []string{"f32", "bf16", "f16"} {
		report := runJSON(t, exitGood, []string{"GGML_CUDA_AR_WIRE=" + wire}, "--sizes", "1K,100K,1M", "--iters", "3", "--input", "special")
		requireGood(t, report)
		for _, r := range report.Results {
			require.Equal(t, wire, r.Wire)
		}
	}
}

func TestRunTypes(t *testing.T) {
	for _, typ := range []string{"f16", "bf16"} {
		report := runJSON(t, exitGood, nil, "--type", typ, "--counts", "0,1,7,5120,524289", "--iters", "3", "--input", "special")
		requireGood(t, report)
		require.Equal(t, typ, report.Results[1].Type)
		require.Equal(t, typ, report.Results[1].Wire)
		require.EqualValues(t, 14, report.Results[2].Bytes)
	}
}

// Every number of ranks, type and path; counts that no number of ranks divides.
func TestRunEveryNumberOfRanks(t *testing.T) {
	report := runJSON(t, exitGood, nil, "--ranks", "3", "--type", "bf16", "--counts", "1,7,1000,1000003")
	requireGood(t, report)
	require.Equal(t, []string{"internal", "internal", "internal", "copy-engine"}, paths(report))
	for ranks := 1; ranks <= maxRanks; ranks++ {
		for _, typ := range []string{"f32", "f16", "bf16"} {
			for _, path := range []string{"internal", "copy-engine"} {
				t.Run(fmt.Sprintf("%d ranks, %s, %s", ranks, typ, path), func(t *testing.T) {
					args := []string{"--ranks", fmt.Sprint(ranks), "--type", typ, "--counts", "1,7,1000,150001", "--iters", "1", "--input", "special"}
					if ranks%2 == 0 {
						args = append(args, "--graph")
					}
					report := runJSON(t, exitGood, []string{"GGML_CUDA_ALLREDUCE=" + map[string]string{"internal": "internal", "copy-engine": "ce"}[path]}, args...)
					requireGood(t, report)
					require.Equal(t, ranks, report.Ranks)
					if ranks == 1 {
						path = "none"
					}
					require.Equal(t, []string{path, path, path, path}, paths(report))
				})
			}
		}
	}
}

func TestRunRefusesShapes(t *testing.T) {
	for _, c := range []struct{ args, message string }{
		{"--ranks 9", "9 ranks are not allowed; allowed: 1 to 8"},
		{"--ranks 0", "0 ranks are not allowed; allowed: 1 to 8"},
		{"--ranks -1", "-1 ranks are not allowed; allowed: 1 to 8"},
		{"--ranks two", `"two"`},
		{"--type f64", "f32, f16, bf16"},
		{"--type i32", "f32, f16, bf16"},
		{"--ranks 3 --devices 0,1", "--devices names 2 devices; allowed: one per rank, 3"},
		{"--ranks 3 --absent 3", "allowed: numbers from 0 to 2"},
	} {
		o := invoke(t, nil, append([]string{"run", "--backend", "emulated", "--counts", "1"}, strings.Fields(c.args)...)...)
		requireRefused(t, o, "allreduce run: ")
		require.Contains(t, o.err, c.message, c.args)
	}
}

// Ranks may share devices, up to what is resident there at once.
func TestRunSharedDevices(t *testing.T) {
	requireGood(t, runJSON(t, exitGood, nil, "--ranks", "8", "--devices", "0,0,0,0,1,1,1,0", "--counts", "7,5120,150001", "--iters", "2"))

	machine := filepath.Join(t.TempDir(), "machine.json")
	require.NoError(t, os.WriteFile(machine, []byte(`{"devices": [{"resident_blocks": 40}, {}]}`), 0o600))
	o := invoke(t, []string{"GGML_CUDA_AR_EMULATED=" + machine, "GGML_CUDA_ALLREDUCE=internal"}, "run", "--backend", "emulated",
		"--ranks", "3", "--devices", "0,0,0", "--counts", "7")
	requireRefused(t, o, "allreduce run: ")
	require.Contains(t, o.err, "3")
	require.Contains(t, o.err, "40", "the arithmetic: %s", o.err)
}

func TestRunGraph(t *testing.T) {
	for _, extra := range [][]string{nil, {"--in-place"}, {"--input", "special"}} {
		report := runJSON(t, exitGood, nil, append(extra, "--graph", "--iters", "5", "--counts", "0,1,5120,20000,300001")...)
		requireGood(t, report)
		require.True(t, report.Graph)
		require.Equal(t, []string{"none", "internal", "internal", "internal", "copy-engine"}, paths(report))
	}
}

// A finding is a finding: the report is whole, the exit code 1.
func TestRunFinding(t *testing.T) {
	report := runJSON(t, exitFinding, []string{"GGML_CUDA_AR_NOOP=1"}, "--sizes", "1K,512K", "--iters", "2")
	require.False(t, report.OK)
	require.Empty(t, report.Error)
	for _, r := range report.Results {
		require.EqualValues(t, 2*2*r.Count, r.Wrong, "every element of both ranks in both iterations")
	}
	require.Len(t, report.Warnings, 1)
	require.Contains(t, report.Warnings[0], "GGML_CUDA_AR_NOOP")

	o := invoke(t, []string{"GGML_CUDA_AR_NOOP=1"}, "run", "--backend", "emulated", "--sizes", "1K", "--iters", "2")
	require.Equal(t, exitFinding, o.code)
	require.Contains(t, o.out, "FINDING")
}

func TestRunText(t *testing.T) {
	o := invoke(t, nil, "run", "--backend", "emulated", "--iters", "2")
	require.Equal(t, exitGood, o.code, o.err)
	require.Empty(t, o.err)
	require.Contains(t, o.out, "SIMULATED")
	require.Contains(t, o.out, "device 0 (rank 0)")
	require.Contains(t, o.out, "rank 1 on device 1, copy-engine")
	require.Contains(t, o.out, "\nok: ")
	rows := 0
	for line := range strings.Lines(o.out) {
		if strings.Contains(line, "GGML_CUDA_AR_CE_MIN_BYTES") {
			rows++
			require.Contains(t, line, " simulated ", "a row alone must not look like hardware")
		}
	}
	require.Equal(t, 4, rows)
}

func TestRunAuto(t *testing.T) {
	if _, err := device.Open(device.CUDA); err == nil {
		t.Skip("there are GPUs here")
	}
	o := invoke(t, nil, "run", "--sizes", "1K", "--iters", "2")
	require.Equal(t, exitGood, o.code, o.err)
	require.Contains(t, o.out, "emulated devices, times are simulated")

	requireRefused(t, invoke(t, nil, "run", "--backend", "cuda", "--sizes", "1K"), "allreduce run: ")
}

// The same command on the GPUs of this machine.
func TestRunCUDA(t *testing.T) {
	testbackend.CUDA(t, 2, func(t *testing.T, _ device.Driver) {
		for _, extra := range [][]string{nil, {"--graph"}, {"--in-place"}, {"--graph", "--in-place", "--input", "special"}} {
			args := append([]string{"run", "--backend", "cuda", "--json", "--counts", "0,1,7,5120,300001,4194304", "--iters", "5"}, extra...)
			o := invoke(t, []string{"GGML_CUDA_P2P=0"}, args...)
			require.Equal(t, exitGood, o.code, "%s%s", o.out, o.err)
			var report runReport
			require.NoError(t, json.Unmarshal([]byte(o.out), &report))
			requireGood(t, report)
			require.Equal(t, "cuda", report.Backend)
			require.False(t, report.Simulated)
			require.Equal(t, []string{"none", "internal", "internal", "internal", "copy-engine", "copy-engine"}, paths(report))
		}
	})
}

func TestRunFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "r.json")
	o := invoke(t, nil, "run", "--backend", "emulated", "--sizes", "1K", "--iters", "2", "--json-file", path)
	require.Equal(t, exitGood, o.code, o.err)
	require.Contains(t, o.out, "ok: ")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var report runReport
	require.NoError(t, json.Unmarshal(text, &report))
	requireGood(t, report)
}

func TestRunSameSeedSameResult(t *testing.T) {
	one := runJSON(t, exitGood, nil, "--sizes", "4K", "--iters", "2", "--seed", "9")
	two := runJSON(t, exitGood, nil, "--sizes", "4K", "--iters", "2", "--seed", "9")
	require.Equal(t, one.Results[0].Count, two.Results[0].Count)
	require.EqualValues(t, 9, two.Seed)
}

// An interrupt ends the run between two batches: the report is whole, nothing is left behind.
func TestRunInterrupted(t *testing.T) {
	interrupt(t, "run", "--sizes", "1K,4M", "--iters", "1000000")
}
