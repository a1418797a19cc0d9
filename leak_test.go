package allreduce_test

import (
	"bufio"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/reference"
	"gpu.example/allreduce/internal/testbackend"
)

// entries counts the entries of a folder of /proc/self: fd, task.
func entries(t *testing.T, folder string) int {
	t.Helper()
	resident(t) // the first file that is read makes Go's poller, which has two descriptors
	list, err := os.ReadDir("/proc/self/" + folder)
	require.NoError(t, err)
	return len(list)
}

// resident is the memory of the process, in bytes.
func resident(t *testing.T) int64 {
	t.Helper()
	text, err := os.ReadFile("/proc/self/statm")
	require.NoError(t, err)
	pages, err := strconv.ParseInt(strings.Fields(string(text))[1], 10, 64)
	require.NoError(t, err)
	return pages * int64(os.Getpagesize())
}

// forcedWays are the paths every communicator of these tests takes in turn.
var forcedWays = []allreduce.Algorithm{allreduce.AlgorithmInternal, allreduce.AlgorithmCopyEngine}

// inAnotherProcess runs tests of this binary with variables that are read at a process's start. False: this is that
// process.
func inAnotherProcess(t *testing.T, tests string, env ...string) (string, bool) {
	t.Helper()
	const inside = "AR_TEST_INSIDE"
	if os.Getenv(inside) != "" {
		return "", false
	}
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, "-test.run", tests, "-test.v", "-test.timeout", "300s")
	cmd.Env = append(append(os.Environ(), inside+"=1"), env...)
	text, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", text)
	return string(text), true
}

// A communicator that was made, used and closed leaves nothing: no descriptor, thread, object or memory.
func TestCreateCloseLeavesNothing(t *testing.T) {
	const rounds = 100
	// Alone in its process: other tests would leave a heap full of holes.
	if _, outside := inAnotherProcess(t, "^TestCreateCloseLeavesNothing$"); outside {
		return
	}
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		buffers := newRig(t, d, allreduce.Config{Ranks: 2})
		p := buffers.setUp(job{count: 1000, kind: reference.Normal, seed: 1})
		round := func(i int) {
			comm, err := allreduce.New(allreduce.Config{Backend: allreduce.Backend(d.Backend()), Ranks: 2, Algorithm: forcedWays[i%len(forcedWays)],
				RingBytes: 1 << 20})
			require.NoError(t, err)
			require.NoError(t, comm.AllReduce(p.bufs))
			if i%3 == 0 { // else Close waits
				buffers.sync()
			}
			require.NoError(t, comm.Close())
			if i%2 == 0 {
				buffers.sync()
			}
		}
		for i := range 6 { // what is made once: kernels, the worker, arenas
			round(i)
		}
		buffers.sync()
		runtime.GC()
		descriptors, threads, memory, objects := entries(t, "fd"), entries(t, "task"), resident(t), device.LiveObjects()
		for i := range rounds {
			round(i)
		}
		buffers.sync()
		require.Equal(t, descriptors, entries(t, "fd"), "descriptors")
		require.Eventually(t, func() bool { return device.LiveObjects() <= objects }, 5*time.Second, 10*time.Millisecond, "the reaper frees what was in use")
		// Go starts threads of its own; one for each communicator would be 100.
		require.Less(t, entries(t, "task"), threads+10, "threads")
		runtime.GC()
		// A communicator's memory is 8 to 16 MiB: 100 of them would be a gigabyte.
		require.Less(t, resident(t)-memory, int64(100<<20), "bytes of memory")
	})
}

// Many calls on one communicator hold no more memory than few. 10^6 on GPUs; emulated devices take 20 us a call or more.
func TestCallsHoldNoMemory(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		for name, cfg := range map[string]allreduce.Config{
			"internal":    {Ranks: 2, Algorithm: allreduce.AlgorithmInternal},
			"copy-engine": {Ranks: 2, Algorithm: allreduce.AlgorithmCopyEngine, RingBytes: 1 << 20},
		} {
			t.Run(name, func(t *testing.T) {
				r := newRig(t, d, cfg)
				calls, slack := 20_000, int64(16<<20)
				if d.Backend() == device.CUDA && name == "internal" {
					calls = 1_000_000
				}
				p := r.setUp(job{count: 256, kind: reference.Normal, seed: 1})
				run := func(n int) {
					for i := range n {
						require.NoError(t, r.comm.AllReduce(p.bufs))
						if i%100 == 99 { // what is in flight is memory too
							r.wait()
						}
					}
					r.sync()
					runtime.GC()
				}
				run(calls / 4)
				memory, objects, before := resident(t), device.LiveObjects(), r.comm.Stats()
				run(calls)
				r.check(p)
				after := r.comm.Stats()
				require.Equal(t, before.Ranks, after.Ranks)
				require.Equal(t, before.Allocations, after.Allocations)
				require.Equal(t, objects, device.LiveObjects())
				require.Less(t, resident(t)-memory, slack, "bytes more after %d calls", calls)
			})
		}
	})
}

// Nothing of a call lives in memory that Go may move or collect: collections run all the time, between and in calls.
func TestForcedGC(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		stop, done := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(done)
			for {
				select {
				case <-stop:
					return
				default:
					runtime.GC()
				}
			}
		}()
		defer func() { close(stop); <-done }()
		for i, algorithm := range slices.Concat(forcedWays, forcedWays) {
			r := newRig(t, d, allreduce.Config{Ranks: 2, Algorithm: algorithm})
			var jobs []*prepared
			for k := range 3 {
				jobs = append(jobs, r.setUp(job{count: 3000 * (k + 1), kind: reference.Specials, seed: uint64(10*i + k)}))
			}
			for range 20 {
				for _, p := range jobs {
					require.NoError(t, r.comm.AllReduce(append([]allreduce.Buffer(nil), p.bufs...))) // garbage at once
				}
				runtime.GC()
			}
			g := r.capture(func() {
				for _, p := range jobs {
					require.NoError(t, r.comm.AllReduce(append([]allreduce.Buffer(nil), p.bufs...)))
				}
			})
			for range 5 {
				runtime.GC()
				r.launch(g)
			}
			r.sync()
			for _, p := range jobs {
				r.check(p)
			}
		}
	})
}

// The same, and two other tests, with memory that is overwritten as soon as it is free, a collection after
// every few kilobytes, and every pointer that goes to C checked. In a process of its own, as GODEBUG is read at its start.
func TestGODEBUG(t *testing.T) {
	text, outside := inAnotherProcess(t, "^(TestForcedGC|TestGraphOverAllDevices|TestBackToBack)$", "GOGC=1",
		"GODEBUG=clobberfree=1,cgocheck=1,gccheckmark=1,invalidptr=1")
	if !outside {
		return
	}
	passed := 0
	for lines := bufio.NewScanner(strings.NewReader(text)); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), "--- PASS") {
			passed++
		}
	}
	require.Equal(t, 3, passed, "%s", text)
}
