package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"gpu.example/allreduce"
)

// asCommand makes the test binary be the command: no second build, and it works where there is no Go.
const asCommand = "AR_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) == "1" {
		main()
		return
	}
	goleak.VerifyTestMain(m)
}

// outcome is what a command line did.
type outcome struct {
	code     int
	out, err string
}

// command makes a command line with a clean environment and the variables given ("NAME=value").
func command(t *testing.T, env []string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, self, args...)
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, "GGML_CUDA_") && !strings.HasPrefix(entry, "NCCL_") {
			cmd.Env = append(cmd.Env, entry)
		}
	}
	cmd.Env = append(append(cmd.Env, asCommand+"=1"), env...)
	return cmd
}

func invoke(t *testing.T, env []string, args ...string) outcome {
	t.Helper()
	cmd := command(t, env, args...)
	var out, err bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &err
	failure := cmd.Run()
	var exit *exec.ExitError
	if failure != nil && !errors.As(failure, &exit) {
		require.NoError(t, failure)
	}
	require.True(t, cmd.ProcessState.Exited(), "ended by a signal: %s\n%s", cmd.ProcessState, err.String())
	return outcome{cmd.ProcessState.ExitCode(), out.String(), err.String()}
}

// decodeReport reads the one JSON object a command ended with.
func decodeReport[R any](t *testing.T, wantCode int, o outcome) R {
	t.Helper()
	require.Equal(t, wantCode, o.code, "%s%s", o.out, o.err)
	var report R
	decoder := json.NewDecoder(strings.NewReader(o.out))
	decoder.DisallowUnknownFields()
	require.NoError(t, decoder.Decode(&report), o.out)
	require.False(t, decoder.More(), "one JSON object only: %s", o.out)
	return report
}

// interrupt starts a command that would go on for long, interrupts it once it reduces, and gives the report it left.
func interrupt(t *testing.T, args ...string) string {
	t.Helper()
	folder := t.TempDir()
	file := filepath.Join(folder, "r.json")
	cmd := command(t, nil, append(args, "--backend", "emulated", "--json-file", file)...)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	var errors strings.Builder
	cmd.Stderr = &errors
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(out)
	for lines.Scan() && !strings.Contains(lines.Text(), "SIMULATED") { // the last line before the reductions
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	for lines.Scan() {
	}
	_ = cmd.Wait()
	require.Equal(t, exitFailed, cmd.ProcessState.ExitCode(), errors.String())
	require.Equal(t, 1, strings.Count(errors.String(), "\n"), errors.String())
	require.Contains(t, errors.String(), "interrupted")
	entries, err := os.ReadDir(folder)
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing else is left behind")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(text), "interrupted")
	return string(text)
}

// runJSON runs `run --backend emulated --json` and reads the report.
func runJSON(t *testing.T, wantCode int, env []string, args ...string) runReport {
	t.Helper()
	o := invoke(t, env, append([]string{"run", "--backend", "emulated", "--json"}, args...)...)
	return decodeReport[runReport](t, wantCode, o)
}

// requireRefused asserts exit 2 and one line on standard error that holds every part.
func requireRefused(t *testing.T, o outcome, parts ...string) {
	t.Helper()
	require.Equal(t, exitFailed, o.code, "%s%s", o.out, o.err)
	require.Equal(t, 1, strings.Count(o.err, "\n"), "one line is wanted: %s", o.err)
	for _, part := range parts {
		require.Contains(t, o.err, part)
	}
}

func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		name string
		env  []string
		args []string
		want []string
	}{
		{"unknown sub-command", nil, []string{"rum"}, []string{`"rum" is no sub-command; allowed:`, "run", "version"}},
		{"unknown flag", nil, []string{"run", "--size", "1K"}, []string{"allreduce run: unknown flag: --size", "--help"}},
		{"argument", nil, []string{"run", "1K"}, []string{`takes no arguments, only flags; got "1K"`}},
		{"argument of version", nil, []string{"version", "x"}, []string{"takes no arguments"}},
		{"backend", nil, []string{"run", "--backend", "hip"}, []string{"--backend", "allowed: auto, cuda, emulated"}},
		{"type", nil, []string{"run", "--type", "f64"}, []string{"--type", "allowed: f32, f16, bf16"}},
		{"op", nil, []string{"run", "--op", "max"}, []string{"--op", "allowed: sum, avg"}},
		{"input", nil, []string{"run", "--input", "zeros"}, []string{"--input", "allowed: normal, exact, special"}},
		{"ranks 0", nil, []string{"run", "--ranks", "0"}, []string{"0 ranks are not allowed; allowed: 1 to 8"}},
		{"ranks 9", nil, []string{"run", "--ranks", "9"}, []string{"allowed: 1 to 8"}},
		{"ranks two", nil, []string{"run", "--ranks", "two"}, []string{"--ranks"}},
		{"iters", nil, []string{"run", "--iters", "0"}, []string{"--iters 0 is not allowed; allowed: 1 to"}},
		{"iters of a graph", nil, []string{"run", "--graph", "--iters", "10001"}, []string{"allowed: 1 to 10000 with --graph"}},
		{"sizes beyond", nil, []string{"run", "--sizes", "1025G"}, []string{`"1025G" is no byte count; allowed: whole numbers up to 1024G`}},
		{"no memory", nil, []string{"run", "--backend", "emulated", "--sizes", "900G"}, []string{"allreduce run: 966367641600 bytes: ", "memory"}},
		{"sizes of half an element", nil, []string{"run", "--sizes", "1K,1026"}, []string{"1026", "no multiple of the element's 4 bytes (f32)"}},
		{"sizes in words", nil, []string{"run", "--sizes", "1KB"}, []string{`"1KB" is no byte count; allowed`}},
		{"sizes empty", nil, []string{"run", "--sizes", ""}, []string{`--sizes: "" is no byte count`}},
		{"sizes negative", nil, []string{"run", "--sizes", "-4"}, []string{"--sizes"}},
		{"counts", nil, []string{"run", "--counts", "1,x"}, []string{`--counts: "x" is no number of elements`}},
		{"sizes and counts", nil, []string{"run", "--counts", "1", "--sizes", "4"}, []string{"--sizes and --counts"}},
		{"absent", nil, []string{"run", "--absent", "2"}, []string{`--absent: "2" is not allowed; allowed: numbers from 0 to 1`}},
		{"devices", nil, []string{"run", "--devices", "0"}, []string{"--devices names 1 devices; allowed: one per rank, 2"}},
		{"device that is not there", nil, []string{"run", "--backend", "emulated", "--devices", "0,77"}, []string{"no device 77"}},
		{"out alone", nil, []string{"run", "--out", "x.npy"}, []string{"--out needs --in"}},
		{"json-file nowhere", nil, []string{"run", "--json-file", "/no/such/x.json"}, []string{"/no/such/x.json", "does not exist"}},
		{"variable", []string{"GGML_CUDA_AR_CE=maybe"}, []string{"run"}, []string{"GGML_CUDA_AR_CE", "maybe", "allowed: 0, 1, true, false, on, off"}},
		{"variable, emulated", []string{"GGML_CUDA_AR_RING_BYTES=1"}, []string{"run", "--backend", "emulated"}, []string{"GGML_CUDA_AR_RING_BYTES", "1M to 256M"}},
		{"disabled", []string{"GGML_CUDA_ALLREDUCE=none"}, []string{"run", "--backend", "emulated"}, []string{"GGML_CUDA_ALLREDUCE=none"}},
		{"forced path that is not there", []string{"GGML_CUDA_ALLREDUCE=nccl"}, []string{"run", "--backend", "emulated"}, []string{"GGML_CUDA_ALLREDUCE=nccl"}},
		{"machine file", []string{"GGML_CUDA_AR_EMULATED=/no/such.json"}, []string{"run", "--backend", "emulated"}, []string{"/no/such.json"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := invoke(t, c.env, c.args...)
			requireRefused(t, o, c.want...)
			require.NotContains(t, o.out, "ok")
			require.NotContains(t, o.out, "warning")
		})
	}
}

func TestHelp(t *testing.T) {
	for _, args := range [][]string{{"--help"}, {"help"}, {"run", "--help"}, {"version", "--help"}, {"env", "--help"}} {
		o := invoke(t, nil, args...)
		require.Equal(t, exitGood, o.code, o.err)
		require.Contains(t, o.out, "Usage:")
	}
	o := invoke(t, nil)
	require.Equal(t, exitFailed, o.code)
	require.Empty(t, o.out)
	require.Contains(t, o.err, "Available Commands:")
	require.Contains(t, o.err, "name a sub-command")
}

func TestVersion(t *testing.T) {
	o := invoke(t, nil, "version", "--json")
	require.Equal(t, exitGood, o.code, o.err)
	var report versionReport
	require.NoError(t, json.Unmarshal([]byte(o.out), &report))
	require.Equal(t, newVersionReport(allreduce.BuildInfo()), report)
	require.Equal(t, allreduce.Version(), report.Version)
	var names []string
	for _, b := range report.Backends {
		names = append(names, b.Name)
		require.Regexp(t, `^\d+\.\d+`, b.Runtime)
	}
	require.Contains(t, names, "emulated")

	o = invoke(t, nil, "version")
	require.Equal(t, exitGood, o.code)
	require.Contains(t, o.out, "backend emulated")
}

func TestABIVersion(t *testing.T) {
	header := filepath.Join("..", "..", "csrc", "include", "allreduce.h")
	text, err := os.ReadFile(header)
	if err != nil {
		t.Skip("the sources are not here")
	}
	match := regexp.MustCompile(`(?m)^#define AR_ABI_VERSION (\d+)`).FindSubmatch(text)
	require.NotNil(t, match)
	assert.JSONEq(t, string(match[1]), mustJSON(t, abiVersion))
}

func mustJSON(t *testing.T, v any) string {
	text, err := json.Marshal(v)
	require.NoError(t, err)
	return string(text)
}

func TestEnv(t *testing.T) {
	o := invoke(t, []string{"GGML_CUDA_AR_CE=maybe"}, "env", "--json")
	require.Equal(t, exitGood, o.code, o.err)
	var report envReport
	require.NoError(t, json.Unmarshal([]byte(o.out), &report))
	require.Len(t, report.Variables, len(allreduce.Variables()))
	for _, v := range report.Variables {
		if v.Name == "GGML_CUDA_AR_CE" {
			require.Equal(t, "maybe", v.Value)
		} else {
			require.Empty(t, v.Value, v.Name)
		}
	}
	o = invoke(t, []string{"GGML_CUDA_AR_PREFER=latency"}, "env")
	require.Equal(t, exitGood, o.code)
	require.Contains(t, o.out, `GGML_CUDA_AR_PREFER (set to "latency", default overlap)`)
	require.Contains(t, o.out, "GGML_CUDA_AR_CE (not set, default 1)")
}
