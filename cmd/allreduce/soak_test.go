package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/testbackend"
	"gpu.example/allreduce/internal/testnccl"
)

// soakJSON runs `soak --backend emulated --json` and reads the report.
func soakJSON(t *testing.T, wantCode int, env []string, args ...string) soakReport {
	t.Helper()
	return readSoak(t, wantCode, invoke(t, env, append([]string{"soak", "--backend", "emulated", "--json"}, args...)...))
}

func readSoak(t *testing.T, wantCode int, o outcome) soakReport {
	t.Helper()
	return decodeReport[soakReport](t, wantCode, o)
}

// requireSoaked asserts that a soak found nothing and that its sums are those of its rows.
func requireSoaked(t *testing.T, r soakReport) {
	t.Helper()
	require.True(t, r.OK)
	require.Nil(t, r.Finding)
	require.Zero(t, r.Mismatches)
	require.Zero(t, r.Hazards)
	var calls, replayed, bytes int64
	for _, row := range r.Results {
		require.True(t, row.RanksEqual)
		calls, replayed, bytes = calls+row.Calls, replayed+row.Replayed, bytes+row.Bytes
	}
	require.Equal(t, r.Calls, calls)
	require.Equal(t, r.Bytes, bytes)
	require.Equal(t, r.Replays > 0, replayed > 0)
}

func soakedPaths(r soakReport) map[string]int64 {
	paths := map[string]int64{}
	for _, row := range r.Results {
		paths[row.Path] += row.Calls
	}
	return paths
}

func TestSoak(t *testing.T) {
	report := soakJSON(t, exitGood, nil, "--calls", "600", "-e", "1M")
	requireSoaked(t, report)
	require.True(t, report.Graph)
	require.GreaterOrEqual(t, report.Calls, int64(600))
	require.Positive(t, report.Replays)
	require.Equal(t, "random", report.Schedule)
	paths := soakedPaths(report)
	require.Positive(t, paths["internal"])
	require.Positive(t, paths["copy-engine"])
	require.Contains(t, report.Skipped[len(report.Skipped)-1].Reason, "NCCL is not available")
}

func TestSoakRanks(t *testing.T) {
	for _, args := range [][]string{{"--ranks", "3"}, {"--schedule", "priorities"}, {"--ranks", "4", "--schedule", "adversarial"}, {"--ranks", "2", "--devices", "0,0", "--schedule", "fifo"}} {
		requireSoaked(t, soakJSON(t, exitGood, nil, append(args, "--calls", "200", "-e", "256K")...))
	}
}

func TestSoakModes(t *testing.T) {
	report := soakJSON(t, exitGood, nil, "--calls", "200", "-e", "64K", "--modes", "eager")
	requireSoaked(t, report)
	require.False(t, report.Graph)
	require.Zero(t, report.Replays)

	report = soakJSON(t, exitGood, nil, "--calls", "200", "-e", "64K", "--modes", "graph")
	requireSoaked(t, report)
	for _, row := range report.Results {
		require.Equal(t, row.Calls, row.Replayed)
	}
	require.GreaterOrEqual(t, report.Graphs, int64(graphSlots))
}

// What is named is soaked, and nothing else.
func TestSoakLists(t *testing.T) {
	report := soakJSON(t, exitGood, nil, "--calls", "100", "--sizes", "4K,40K", "--paths", "ce", "--types", "f32,f16", "--wire", "f16")
	requireSoaked(t, report)
	require.Empty(t, report.Skipped)
	for _, row := range report.Results {
		require.Equal(t, "copy-engine", row.Path)
		require.Equal(t, "f16", row.Wire)
		require.Zero(t, row.Bytes%(4<<10))
	}
	requireRefused(t, invoke(t, nil, "soak", "--backend", "emulated", "--paths", "nccl"), "GGML_CUDA_ALLREDUCE=nccl cannot be had here")
}

func TestSoakNCCL(t *testing.T) {
	library := testnccl.Build(t)
	for _, ranks := range []string{"2", "3"} {
		report := soakJSON(t, exitGood, []string{"GGML_CUDA_NCCL_LIB=" + library}, "--calls", "300", "-e", "64K", "--ranks", ranks)
		requireSoaked(t, report)
		require.Positive(t, soakedPaths(report)["nccl"])
	}
}

// The same seed makes the same calls, another one others.
func TestSoakSeed(t *testing.T) {
	run := func(seed string) soakReport {
		report := soakJSON(t, exitGood, nil, "--calls", "300", "-e", "64K", "--seed", seed)
		requireSoaked(t, report)
		report.Seconds, report.IdleGaps, report.IdleSeconds = 0, 0, 0
		return report
	}
	require.Equal(t, run("5"), run("5"))
	require.NotEqual(t, run("5").Bytes, run("6").Bytes)
}

func TestSoakIdle(t *testing.T) {
	report := soakJSON(t, exitGood, nil, "--duration", "2s", "-e", "16K", "--idle", "100ms")
	requireSoaked(t, report)
	require.Positive(t, report.IdleGaps)
	require.Positive(t, report.IdleSeconds)
	require.Less(t, report.IdleSeconds, 1.0)
}

// again runs a finding's command, which must find the same.
func again(t *testing.T, env []string, report soakReport) {
	t.Helper()
	words := strings.Fields(report.Finding.Command)
	require.Equal(t, []string{"allreduce", "soak"}, words[:2])
	second := readSoak(t, exitFinding, invoke(t, env, append(words[1:], "--json")...))
	first, same := *report.Finding, *second.Finding
	same.Command = first.Command // the second one's names --calls after the first one's flags
	first.Report, same.Report = addresses.ReplaceAllString(first.Report, "0x"), addresses.ReplaceAllString(same.Report, "0x")
	require.Equal(t, first, same)
}

// addresses differ from process to process.
var addresses = regexp.MustCompile(`0x[0-9a-f]+`)

func TestSoakMismatch(t *testing.T) {
	env := []string{"GGML_CUDA_AR_NOOP=1"}
	report := soakJSON(t, exitFinding, env, "-e", "16K", "--modes", "eager")
	require.False(t, report.OK)
	require.Empty(t, report.Error)
	require.Positive(t, report.Mismatches)
	f := report.Finding
	require.Equal(t, findingMismatch, f.Kind)
	require.NotEqual(t, f.Expected, f.Got)
	require.NotEmpty(t, f.Path)
	require.Positive(t, f.Bytes)
	require.Zero(t, f.Call, "the first call is wrong")
	require.EqualValues(t, 1, f.Seed)
	again(t, env, report)

	o := invoke(t, env, "soak", "--backend", "emulated", "-e", "16K")
	require.Equal(t, exitFinding, o.code)
	require.Contains(t, o.out, "FINDING: mismatch in call ")
	require.Contains(t, o.out, "again: allreduce soak ")
}

// A replay that was wrong is found, though a later replay of the same graph overwrites it.
func TestSoakMismatchInGraph(t *testing.T) {
	report := soakJSON(t, exitFinding, []string{"GGML_CUDA_AR_NOOP=1"}, "-e", "16K", "--modes", "graph")
	require.Equal(t, findingMismatch, report.Finding.Kind)
	require.Equal(t, modeGraph, report.Finding.Mode)
}

// With an ordering primitive taken out the soak finds it, and names what went wrong. (All of them: `for m in ...; do allreduce
// soak --mutate $m; done`; tests/cpp/mutations_test.cpp is quicker at that.)
func TestSoakMutate(t *testing.T) {
	for _, c := range []struct {
		args string
		kind string
		want string
	}{
		{"--mutate internal_wait -e 256K", findingHazard, "not ordered after a"},
		{"--mutate internal_slot -e 256K", findingHazard, "not ordered after a"},
		{"--mutate internal_flag -e 256K", findingFailure, "waited 10000 ms for rank"},
		{"--mutate ce_slot_free --paths ce --sizes 2M --modes eager", findingHazard, "not ordered after a"},
		{"--mutate ce_chunk_arrived --paths ce --sizes 512K --modes eager", findingHazard, "not ordered after a"},
		{"--mutate internal_join --devices 0,0 --sizes 64K", findingHazard, "not ordered"},
	} {
		t.Run(c.args, func(t *testing.T) {
			report := soakJSON(t, exitFinding, nil, strings.Fields(c.args)...)
			f := report.Finding
			require.Equal(t, c.kind, f.Kind, "%+v", f)
			require.Contains(t, f.Report+f.Text, c.want)
			require.Equal(t, strings.Fields(c.args)[1], f.Mutate)
			require.Equal(t, c.kind == findingHazard, report.Hazards > 0)
			again(t, nil, report)
		})
	}
}

func TestSoakText(t *testing.T) {
	file := filepath.Join(t.TempDir(), "r.json")
	o := invoke(t, nil, "soak", "--backend", "emulated", "--calls", "100", "-e", "16K", "--json-file", file)
	require.Equal(t, exitGood, o.code, o.err)
	require.Empty(t, o.err)
	require.Contains(t, o.out, "SIMULATED")
	require.Contains(t, o.out, "without path nccl: ")
	require.Contains(t, o.out, " 0 mismatches, 0 hazards")
	require.Contains(t, o.out, "\nok: ")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var report soakReport
	require.NoError(t, json.Unmarshal(text, &report))
	requireSoaked(t, report)
}

func TestSoakInterrupted(t *testing.T) {
	require.Contains(t, interrupt(t, "soak", "--duration", "1h", "-e", "16K"), `"error": "interrupted"`)
}

func TestSoakMachineFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "m.json")
	require.NoError(t, os.WriteFile(file, []byte(`{"devices": [{}, {}], "drive": "stepped", "schedule": "adversarial"}`), 0o600))
	env := []string{"GGML_CUDA_AR_EMULATED=" + file}
	report := soakJSON(t, exitGood, env, "--calls", "100", "-e", "16K")
	requireSoaked(t, report)
	require.Equal(t, "adversarial", report.Schedule)
	requireRefused(t, invoke(t, env, "soak", "--backend", "emulated", "--schedule", "fifo"), "--schedule", "GGML_CUDA_AR_EMULATED")
}

func TestSoakRefusals(t *testing.T) {
	for _, c := range []struct {
		name string
		env  []string
		args []string
		want []string
	}{
		{"argument", nil, []string{"1K"}, []string{`takes no arguments, only flags; got "1K"`}},
		{"duration 0", nil, []string{"--duration", "0s"}, []string{"--duration 0s is not allowed; allowed: above 0, up to 720h"}},
		{"duration without unit", nil, []string{"--duration", "60"}, []string{"--duration", "60"}},
		{"calls", nil, []string{"--calls", "-1"}, []string{"--calls -1 is not allowed; allowed: 0 (no limit) and up"}},
		{"idle", nil, []string{"--idle", "-1s"}, []string{"--idle -1s is not allowed; allowed: 0 to 1h"}},
		{"one rank", nil, []string{"--ranks", "1"}, []string{"1 ranks are not allowed; allowed: 2 to 8"}},
		{"devices", nil, []string{"--devices", "0"}, []string{"--devices names 1 devices; allowed: one per rank, 2"}},
		{"paths", nil, []string{"--paths", "internal,fast"}, []string{`--paths: "fast" is not allowed; allowed: auto, internal, copy-engine, peer, nccl, ce`}},
		{"paths twice", nil, []string{"--paths", "ce,copy-engine"}, []string{"--paths names copy-engine twice"}},
		{"paths none", nil, []string{"--paths", ""}, []string{`--paths: "" is not allowed`}},
		{"types", nil, []string{"--types", "f64"}, []string{`--types: "f64" is not allowed; allowed: f32, f16, bf16`}},
		{"wire", nil, []string{"--wire", "f8"}, []string{`--wire: "f8" is not allowed; allowed: auto, f32, bf16, f16`}},
		{"modes", nil, []string{"--modes", "lazy"}, []string{`--modes: "lazy" is not allowed; allowed: eager, graph`}},
		{"sizes", nil, []string{"--sizes", "6"}, []string{"6", "no multiple of the element's 4 bytes (f32)"}},
		{"sizes 0", nil, []string{"--sizes", "0,4K"}, []string{"--sizes: 0 reduces nothing"}},
		{"sizes and -b", nil, []string{"--sizes", "4K", "-b", "4"}, []string{"--sizes cannot be used together with -b or -e"}},
		{"-b", nil, []string{"-b", "1"}, []string{"-b 1 is less than one element (4 bytes)"}},
		{"-b above -e", nil, []string{"-b", "2M", "-e", "1M"}, []string{"-b 2M is larger than -e 1M"}},
		{"no memory", nil, []string{"--backend", "emulated", "-e", "900G"}, []string{"memory"}},
		{"schedule", nil, []string{"--schedule", "late"}, []string{"--schedule", "allowed: fifo, random, adversarial, priorities"}},
		{"mutate", nil, []string{"--mutate", "x"}, []string{`--mutate: "x" is no ordering primitive; allowed: call_order, `}},
		{"json-file nowhere", nil, []string{"--json-file", "/no/such/x.json"}, []string{"/no/such/x.json", "does not exist"}},
		{"variable", []string{"GGML_CUDA_AR_CE=maybe"}, []string{"--backend", "emulated"}, []string{"GGML_CUDA_AR_CE", "maybe", "allowed"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := invoke(t, c.env, append([]string{"soak"}, c.args...)...)
			requireRefused(t, o, c.want...)
			require.NotContains(t, o.out, "ok")
		})
	}
}

// On the GPUs of this machine: small reductions, and every size.
func TestSoakCUDA(t *testing.T) {
	testbackend.CUDA(t, 2, func(t *testing.T, _ device.Driver) {
		for _, args := range [][]string{{"--sizes", "4K", "--calls", "50000"}, {"-e", "16M", "--calls", "5000", "--seed", "2"}} {
			report := readSoak(t, exitGood, invoke(t, []string{"GGML_CUDA_P2P=0"}, append([]string{"soak", "--backend", "cuda", "--json", "--duration", "90s"}, args...)...))
			requireSoaked(t, report)
			require.Equal(t, "cuda", report.Backend)
			require.False(t, report.Simulated)
			require.Positive(t, report.Replays)
		}
	})
}
