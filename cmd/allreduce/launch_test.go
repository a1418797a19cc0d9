package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRunLaunch(t *testing.T) {
	for _, ranks := range []string{"2", "4"} {
		runtime := t.TempDir()
		report := runJSON(t, exitGood, []string{"XDG_RUNTIME_DIR=" + runtime}, "--launch", ranks, "--iters", "4", "--sizes", "1K,64K,1M")
		requireGood(t, report)
		require.Equal(t, ranks, fmt.Sprint(report.Ranks))
		require.Equal(t, ranks, fmt.Sprint(report.Processes))
		require.Len(t, report.Results, 3)
		require.Len(t, report.Devices, report.Ranks)
		for i, d := range report.Devices {
			require.Equal(t, []int{i}, d.Ranks)
		}
		held := map[int]bool{}
		for _, m := range report.Memory {
			held[m.Rank] = true
		}
		require.Len(t, held, report.Ranks)
		requireNoFiles(t, runtime)
	}
}

// requireNoFiles: the rendezvous's folder may stay, its files not.
func requireNoFiles(t *testing.T, runtime string) {
	t.Helper()
	entries, _ := os.ReadDir(filepath.Join(runtime, "allreduce"))
	require.Empty(t, entries)
}

func TestRunLaunchOptions(t *testing.T) {
	report := runJSON(t, exitGood, []string{"GGML_CUDA_ALLREDUCE=internal"}, "--launch", "2", "--iters", "4", "--sizes", "64K", "--graph")
	requireGood(t, report)
	require.True(t, report.Graph)
	report = runJSON(t, exitGood, nil, "--launch=3", "--iters", "4", "--counts", "0,1,7,100000", "--in-place", "--absent", "1", "--op", "avg", "--type", "bf16")
	requireGood(t, report)
	require.Equal(t, []int{1}, report.Absent)
	report = runJSON(t, exitGood, []string{"GGML_CUDA_AR_WIRE=bf16"}, "--launch", "2", "--iters", "3", "--sizes", "64K")
	requireGood(t, report)
	require.Equal(t, "bf16", report.Results[0].Wire)
}

func TestRunLaunchRefused(t *testing.T) {
	for _, c := range []struct {
		env  []string
		args []string
		want string
	}{
		{nil, []string{"--launch", "9"}, "--launch 9 is not allowed; allowed: 1 to 8"},
		{nil, []string{"--launch", "2", "--ranks", "3"}, "--ranks 3 with --launch 2"},
		{[]string{"RANK=0", "WORLD_SIZE=2"}, []string{"--launch", "2"}, "launched already"},
		{[]string{"RANK=2", "WORLD_SIZE=2"}, nil, "RANK=2 is not below WORLD_SIZE=2"},
		{[]string{"RANK=1", "WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=2"}, nil, "OMPI_COMM_WORLD_RANK=0 contradicts RANK=1"},
		{[]string{"RANK=1", "WORLD_SIZE=2"}, []string{"--ranks", "3"}, "3 ranks are asked for and 2 processes were launched"},
		{nil, []string{"--launch", "2", "--devices", "1,1"}, "ranks 0 and 1 are on the same device"},
	} {
		o := invoke(t, c.env, append([]string{"run", "--backend", "emulated"}, c.args...)...)
		require.Equal(t, exitFailed, o.code, "%v: %s%s", c, o.out, o.err)
		require.Contains(t, o.err, c.want)
	}
}

// The variables of each launcher, set by hand.
func TestRunUnderLaunchers(t *testing.T) {
	for name, variables := range map[string]func(rank int) []string{
		"torchrun": func(r int) []string {
			return []string{fmt.Sprint("RANK=", r), "WORLD_SIZE=2", fmt.Sprint("LOCAL_RANK=", r), "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=localhost", "MASTER_PORT=29500"}
		},
		"mpirun": func(r int) []string {
			return []string{fmt.Sprint("OMPI_COMM_WORLD_RANK=", r), "OMPI_COMM_WORLD_SIZE=2", fmt.Sprint("OMPI_COMM_WORLD_LOCAL_RANK=", r),
				"OMPI_COMM_WORLD_LOCAL_SIZE=2", fmt.Sprint("PMIX_RANK=", r), "PMIX_NAMESPACE=prterun@1"}
		},
		"srun": func(r int) []string {
			return []string{fmt.Sprint("SLURM_PROCID=", r), "SLURM_STEP_NUM_TASKS=2", fmt.Sprint("SLURM_LOCALID=", r), "SLURM_JOB_ID=7", "SLURM_STEP_ID=0"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			runtime := t.TempDir()
			outs := make([]outcome, 2)
			var wg sync.WaitGroup
			for r := range outs {
				wg.Go(func() {
					outs[r] = invoke(t, append(variables(r), "XDG_RUNTIME_DIR="+runtime), "run", "--backend", "emulated", "--json", "--sizes", "4K", "--iters", "4")
				})
			}
			wg.Wait()
			require.Equal(t, exitGood, outs[0].code, outs[0].err)
			require.Equal(t, exitGood, outs[1].code, outs[1].err)
			require.Empty(t, outs[1].out, "rank 0 speaks")
			var report runReport
			require.NoError(t, json.Unmarshal([]byte(outs[0].out), &report))
			requireGood(t, report)
			require.Equal(t, 2, report.Processes)
			requireNoFiles(t, runtime)
		})
	}
}

// perf: all ranks make the same plan, rank 0 reports and writes the files.
func TestPerfLaunch(t *testing.T) {
	dir := t.TempDir()
	csv := filepath.Join(dir, "p.csv")
	o := invoke(t, []string{"XDG_RUNTIME_DIR=" + dir, "GGML_CUDA_ALLREDUCE=internal"}, "perf", "--backend", "emulated", "--launch", "3", "-b", "1K", "-e", "256K", "-f", "16",
		"--modes", "eager,graph", "--wire", "f32,bf16", "-o", "avg", "--json", "--csv", csv)
	require.Equal(t, exitGood, o.code, o.err)
	var report perfReport
	require.NoError(t, json.Unmarshal([]byte(o.out), &report))
	require.True(t, report.OK)
	require.Equal(t, 3, report.Ranks)
	require.Equal(t, 3, report.Processes)
	require.Len(t, report.Devices, 3)
	require.Len(t, report.Results, 3*2*2)
	for _, row := range report.Results {
		require.Equal(t, "internal", row.Path)
		require.Positive(t, row.Ours.Median)
		require.Positive(t, row.InPlace.Median)
		require.Zero(t, row.BoundUs)
	}
	require.FileExists(t, csv)
	requireNoFiles(t, dir)
	o = invoke(t, []string{"XDG_RUNTIME_DIR=" + dir}, "perf", "--backend", "emulated", "--launch", "2", "-b", "1M", "-e", "1M", "-n", "4", "-d", "half")
	require.Equal(t, exitGood, o.code, o.err)
	require.Contains(t, o.out, "one process per rank: 2")
	require.Contains(t, o.out, "copy-engine")
}

func TestSoakLaunch(t *testing.T) {
	dir := t.TempDir()
	o := invoke(t, []string{"XDG_RUNTIME_DIR=" + dir}, "soak", "--backend", "emulated", "--launch", "2", "--duration", "60s", "--calls", "300", "--idle", "100ms", "--json")
	require.Equal(t, exitGood, o.code, o.err)
	var report soakReport
	require.NoError(t, json.Unmarshal([]byte(o.out), &report))
	require.True(t, report.OK)
	require.Equal(t, 2, report.Processes)
	require.Len(t, report.Devices, 2)
	require.GreaterOrEqual(t, report.Calls, int64(300))
	paths := map[string]bool{}
	for _, row := range report.Results {
		paths[row.Path] = true
	}
	require.Equal(t, map[string]bool{"internal": true, "copy-engine": true}, paths)
	require.Positive(t, report.Replays)
	requireNoFiles(t, dir)
}

// What goes wrong on one rank ends the run on all with a finding.
func TestSoakLaunchFinding(t *testing.T) {
	dir := t.TempDir()
	outs := make([]outcome, 2)
	var wg sync.WaitGroup
	for r := range outs {
		wg.Go(func() {
			env := []string{fmt.Sprint("RANK=", r), "WORLD_SIZE=2", "XDG_RUNTIME_DIR=" + dir, "GGML_CUDA_AR_RENDEZVOUS=finding", "GGML_CUDA_AR_SPIN_TIMEOUT_MS=1000"}
			args := []string{"soak", "--backend", "emulated", "--duration", "60s", "--sizes", "4K", "--paths", "internal", "--idle", "0"}
			if r == 1 {
				args = append(args, "--mutate", "internal_ll_wait") // this rank takes what is there
			}
			outs[r] = invoke(t, env, args...)
		})
	}
	wg.Wait()
	for r, o := range outs {
		require.Equal(t, exitFinding, o.code, "rank %d: %s%s", r, o.out, o.err)
	}
	require.Contains(t, outs[0].out, "FINDING: ")
	require.Contains(t, outs[0].out, "rank 1")
	require.NotContains(t, outs[1].out, "FINDING", "rank 0 speaks")
}

func TestLaunchIsForOneProcess(t *testing.T) {
	for _, args := range [][]string{
		{"perf", "--overlap"}, {"perf", "--precision"}, {"perf", "--timeline", "x.svg"}, {"perf", "--bound"}, {"perf", "--vs", "nccl", "--sweep", "full"},
		{"soak", "--schedule", "fifo"},
	} {
		o := invoke(t, nil, append(args, "--backend", "emulated", "--launch", "2")...)
		require.Equal(t, exitFailed, o.code, "%v: %s%s", args, o.out, o.err)
		require.Contains(t, o.err, "is for one process; allowed: without --launch", "%v", args)
	}
	o := invoke(t, nil, "perf", "--launch", "2", "-g", "3")
	require.Equal(t, exitFailed, o.code)
	require.Contains(t, o.err, "--ngpus 3 with --launch 2")
}

// kill -9 of one of four: the others say which, end within the deadline, and the command exits 2.
func TestRunLaunchKilled(t *testing.T) {
	runtime := t.TempDir()
	cmd := command(t, []string{"XDG_RUNTIME_DIR=" + runtime}, "run", "--backend", "emulated", "--launch", "4", "--sizes", "4K,8K", "--iters", "1000000")
	var out, err bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &err
	require.NoError(t, cmd.Start())
	var victim int
	require.Eventually(t, func() bool {
		for pid, rank := range childrenOf(t, cmd.Process.Pid) {
			maps, _ := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
			if rank == "2" && strings.Contains(string(maps), "memfd:allreduce") {
				victim = pid
				return true
			}
		}
		return false
	}, 20*time.Second, 5*time.Millisecond)
	time.Sleep(200 * time.Millisecond)
	require.NoError(t, syscall.Kill(victim, syscall.SIGKILL))
	start := time.Now()
	_ = cmd.Wait()
	require.Less(t, time.Since(start), 10*time.Second)
	require.Equal(t, exitFailed, cmd.ProcessState.ExitCode())
	require.Contains(t, err.String(), "rank 2 ended with signal: killed")
	for _, prefix := range []string{"allreduce run: ", "rank 1: allreduce run: ", "rank 3: allreduce run: "} {
		require.Regexp(t, "(?m)^"+prefix+"(4096 bytes: )?(AllReduce|Err): rank 2: the process of rank 2 has ended; the communicator is unusable$", err.String())
	}
	requireNoFiles(t, runtime)
}

// childrenOf gives the processes that a process has started, with their RANK.
func childrenOf(t *testing.T, parent int) map[int]string {
	t.Helper()
	list := map[int]string{}
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", parent))
	for _, task := range tasks {
		text, _ := os.ReadFile(task)
		for pid := range strings.FieldsSeq(string(text)) {
			environ, _ := os.ReadFile("/proc/" + pid + "/environ")
			for entry := range strings.SplitSeq(string(environ), "\x00") {
				if rank, ok := strings.CutPrefix(entry, "RANK="); ok {
					var n int
					_, _ = fmt.Sscan(pid, &n)
					list[n] = rank
				}
			}
		}
	}
	return list
}
