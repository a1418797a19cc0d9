package allreduce_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/reference"
	"gpu.example/allreduce/internal/testbackend"
	"gpu.example/allreduce/internal/testnccl"
)

// runFallible enqueues a prepared job and gives the error instead of failing.
func (r *rig) runFallible(p *prepared) error {
	if err := r.comm.AllReduce(p.bufs); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return r.comm.Wait(ctx)
}

// doubles reduces F64 tensors, which only NCCL serves.
func (r *rig) doubles(count int) (error, bool) {
	bufs := make([]allreduce.Buffer, len(r.devices))
	for rank := range bufs {
		host := make([]byte, 8*count)
		for i := range count {
			binary.LittleEndian.PutUint64(host[8*i:], math.Float64bits(float64(i)+0.25*float64(rank+1)))
		}
		p := r.malloc(rank, int64(len(host)))
		require.NoError(r.t, r.d.CopyToDevice(r.devices[rank], p, host))
		bufs[rank] = allreduce.Buffer{Send: p, Recv: p, Count: count, Type: allreduce.F64, Stream: r.streams[rank]}
	}
	if err := r.comm.AllReduce(bufs); err != nil {
		return err, false
	}
	r.wait()
	for rank := range bufs {
		host := make([]byte, 8*count)
		require.NoError(r.t, r.d.CopyToHost(r.devices[rank], host, bufs[rank].Recv))
		for i := range count {
			if math.Float64frombits(binary.LittleEndian.Uint64(host[8*i:])) != 2*float64(i)+0.75 {
				return nil, false
			}
		}
	}
	return nil, true
}

// All of {NCCL there, absent, too old} x {CE 0, 1} x {copy-engine allocation fails or not} x {F32, another type}: where a
// megabyte goes, and that the sum is right wherever it went.
func TestFallbackTable(t *testing.T) {
	good, old := testnccl.Build(t), testnccl.Build(t, "-DAR_NCCL_VERSION=21700")
	libraries := []struct{ name, path string }{{"there", good}, {"absent", "/nonexistent/libnccl.so.2"}, {"too old", old}}
	for _, lib := range libraries {
		for _, ce := range []allreduce.Switch{allreduce.Off, allreduce.On} {
			for _, fails := range []bool{false, true} {
				for _, double := range []bool{false, true} {
					name := fmt.Sprintf("NCCL %s, CE %d, allocation fails %v, F64 %v", lib.name, ce, fails, double)
					t.Run(name, func(t *testing.T) {
						testbackend.Emulated(t, device.DefaultMachine(2), func(t *testing.T, d device.Driver) {
							there := lib.name == "there"
							r := newRig(t, d, allreduce.Config{Ranks: 2, NCCLLib: lib.path, CopyEngine: ce})
							if double {
								err, right := r.doubles(1 << 17)
								if there {
									require.NoError(t, err)
									assert.True(t, right)
									assert.EqualValues(t, 1, r.comm.Stats().Paths[allreduce.PathNCCL].Calls)
								} else {
									require.ErrorIs(t, err, allreduce.ErrUnsupported)
									assert.ErrorContains(t, err, "f64")
								}
								return
							}
							want := allreduce.PathInternal
							switch {
							case ce == allreduce.On && !fails:
								want = allreduce.PathCopyEngine
							case there:
								want = allreduce.PathNCCL
							}
							p := r.setUp(job{count: 1 << 18, kind: reference.Integers, seed: 5})
							if fails {
								device.Fail(device.CallMalloc, 1)
								if want == allreduce.PathNCCL { // its conversion buffer must not be hit as well
									require.NoError(t, r.comm.Prepare(0))
								}
							}
							err := r.runFallible(p)
							device.Fail(device.CallMalloc, 0)
							if fails && ce == allreduce.Off && there { // NCCL's own buffer: the last path there is
								require.ErrorIs(t, err, allreduce.ErrAlloc)
								return
							}
							require.NoError(t, err)
							r.check(p)
							assert.EqualValues(t, 1, r.comm.Stats().Paths[want].Calls, r.comm.Stats().Warnings)
							if fails && ce == allreduce.On {
								assert.Contains(t, fmt.Sprint(r.comm.Stats().Warnings), "copy-engine is given up")
							}
						})
					})
				}
			}
		}
	}
}

func TestNCCLServesEverything(t *testing.T) {
	lib := testnccl.Build(t)
	testbackend.Emulated(t, device.DefaultMachine(3), func(t *testing.T, d device.Driver) {
		for _, ranks := range []int{2, 3} {
			r := newRig(t, d, allreduce.Config{Ranks: ranks, NCCLLib: lib, Algorithm: allreduce.AlgorithmNCCL})
			assert.Equal(t, 23007, r.comm.Stats().NCCLVersion)
			for _, j := range []job{
				{typ: allreduce.F32, count: 1000}, {typ: allreduce.F32, count: 1 << 18}, {typ: allreduce.F16, count: 77},
				{typ: allreduce.BF16, count: 4097, inPlace: true}, {typ: allreduce.F32, count: 900, absent: []int{1}},
				{typ: allreduce.F32, count: 3 * 501, rows: 3, gapBytes: 12}, {typ: allreduce.F32, count: 999, sendOff: 4, recvOff: 12},
				{typ: allreduce.F32, count: 1 << 18, absent: []int{0}, rows: 2, gapBytes: 4, inPlace: true},
			} {
				j.kind, j.seed = reference.Integers, 9
				p := r.setUp(j)
				require.Equal(t, allreduce.PathNCCL, p.path)
				require.NoError(t, r.runFallible(p), j)
				r.check(p)
			}
		}
	})
}

// Memory of NCCL's own: as good as any other, on every path, and gone with the communicator.
func TestNCCLWindows(t *testing.T) {
	lib := testnccl.Build(t)
	testbackend.Emulated(t, device.DefaultMachine(3), func(t *testing.T, d device.Driver) {
		const n = 1 << 16
		before := device.LiveObjects()
		comm, err := allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: 3, NCCLLib: lib, Algorithm: allreduce.AlgorithmNCCL})
		require.NoError(t, err)
		_, err = comm.NCCLWindows(0)
		require.ErrorIs(t, err, allreduce.ErrArgument)
		send, err := comm.NCCLWindows(4 * n)
		require.NoError(t, err)
		recv, err := comm.NCCLWindows(4 * n)
		require.NoError(t, err)
		require.Len(t, send, 3)
		buffers := make([]allreduce.Buffer, 3)
		var streams []device.Stream
		for rank := range 3 {
			s, err := d.NewStream(rank)
			require.NoError(t, err)
			streams = append(streams, s)
			ones := make([]float32, n)
			for i := range ones {
				ones[i] = float32(1 + rank)
			}
			require.NoError(t, d.CopyToDevice(rank, send[rank], device.Bytes(ones)))
			buffers[rank] = allreduce.Buffer{Send: send[rank], Recv: recv[rank], Count: n, Stream: s}
		}
		require.NoError(t, comm.AllReduce(buffers))
		require.NoError(t, comm.Wait(context.Background()))
		for rank := range 3 {
			got := make([]float32, n)
			require.NoError(t, d.CopyToHost(rank, device.Bytes(got), recv[rank]))
			assert.Equal(t, slices.Repeat([]float32{6}, n), got)
		}
		require.NoError(t, comm.Close())
		for rank, s := range streams {
			require.NoError(t, d.DestroyStream(rank, s))
		}
		require.Eventually(t, func() bool { return device.LiveObjects() == before }, 3*time.Second, 5*time.Millisecond)
		_, err = comm.NCCLWindows(4)
		require.ErrorIs(t, err, allreduce.ErrClosed)

		for _, c := range []struct {
			lib, fault string
			want       error
			text       string
		}{
			{testnccl.Build(t, "-DAR_NCCL_VERSION=22500", "-DAR_NCCL_WITHOUT_WINDOWS"), "", allreduce.ErrUnsupported, "NCCL 2.25.0 has no symmetric windows"},
			{"/nonexistent/libnccl.so.2", "", allreduce.ErrUnsupported, "no NCCL"},
			{lib, "window", allreduce.ErrNCCL, "ncclCommWindowRegister"},
		} {
			t.Setenv("AR_EMULATED_NCCL", c.fault)
			comm, err := allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: 2, NCCLLib: c.lib})
			require.NoError(t, err)
			_, err = comm.NCCLWindows(4 * n)
			require.ErrorIs(t, err, c.want)
			require.ErrorContains(t, err, c.text)
			require.NoError(t, comm.Close())
		}
	})
}

// What is wrong with a library is said in one sentence, and routing goes on without it.
func TestNCCLThatCannotServe(t *testing.T) {
	text := filepath.Join(t.TempDir(), "libnccl.so.2")
	require.NoError(t, os.WriteFile(text, []byte("this is no library"), 0o600))
	real := testnccl.Build(t, "-Dar_emulated_nccl_bind=some_other_name")
	for _, c := range []struct{ path, reason string }{
		{"/nonexistent/libnccl.so.2", "no NCCL"},
		{text, "no NCCL"},
		{testnccl.Build(t, "-DAR_NCCL_VERSION=21700"), "2.17.0: 2.18.0 or later is needed"},
		{testnccl.Build(t, "-DAR_NCCL_WITHOUT_GROUP"), "lacks ncclGroupStart"},
		{real, "is a real NCCL"},
	} {
		testbackend.Emulated(t, device.DefaultMachine(2), func(t *testing.T, d device.Driver) {
			_, err := allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: 2, NCCLLib: c.path, Algorithm: allreduce.AlgorithmNCCL})
			require.ErrorIs(t, err, allreduce.ErrNCCL)
			assert.ErrorContains(t, err, c.reason)
			r := newRig(t, d, allreduce.Config{Ranks: 2, NCCLLib: c.path, CopyEngine: allreduce.Off})
			p := r.setUp(job{count: 1 << 18, kind: reference.Normal, seed: 3})
			require.Equal(t, allreduce.PathInternal, p.path)
			require.NoError(t, r.runFallible(p))
			r.check(p)
		})
	}
}

func TestNCCLFailures(t *testing.T) {
	lib := testnccl.Build(t)
	config := allreduce.Config{Ranks: 2, NCCLLib: lib, Algorithm: allreduce.AlgorithmNCCL, SpinTimeout: 200 * time.Millisecond}
	for _, what := range []string{"init", "call", "hang"} {
		t.Run(what, func(t *testing.T) {
			testbackend.Emulated(t, device.DefaultMachine(2), func(t *testing.T, d device.Driver) {
				r := newRig(t, d, config)
				p := r.setUp(job{count: 100, kind: reference.Normal})
				t.Setenv("AR_EMULATED_NCCL", what)
				start := time.Now()
				err := r.runFallible(p)
				if what == "hang" {
					require.ErrorIs(t, err, allreduce.ErrTimeout)
					assert.ErrorContains(t, err, "NCCL")
				} else {
					require.ErrorIs(t, err, allreduce.ErrNCCL)
				}
				assert.Less(t, time.Since(start), 10*time.Second)
				if what != "init" { // part of a group may run: the communicator is done with
					require.Error(t, r.comm.AllReduce(p.bufs))
				}
			})
		})
	}
}

// graphPerDevice captures what f enqueues into one graph per rank, on the rank's own stream.
func (r *rig) graphPerDevice(f func()) []device.Graph {
	r.t.Helper()
	for rank, s := range r.streams {
		require.NoError(r.t, r.d.BeginCapture(r.devices[rank], s))
	}
	f()
	var graphs []device.Graph
	for rank, s := range r.streams {
		g, err := r.d.EndCapture(r.devices[rank], s)
		require.NoError(r.t, err)
		graphs = append(graphs, g)
	}
	return graphs
}

func (r *rig) destroy(graphs []device.Graph) {
	r.t.Helper()
	for rank, g := range graphs {
		require.NoError(r.t, r.d.DestroyGraph(r.devices[rank], g))
	}
}

// A graph per device, each replayed by a thread of its own as fast as it can.
func TestNCCLGraphPerDevice(t *testing.T) {
	lib := testnccl.Build(t)
	testbackend.Emulated(t, device.DefaultMachine(3), func(t *testing.T, d device.Driver) {
		for _, ranks := range []int{2, 3} {
			r := newRig(t, d, allreduce.Config{Ranks: ranks, NCCLLib: lib, Algorithm: allreduce.AlgorithmNCCL})
			jobs := []*prepared{
				r.setUp(job{count: 1000, kind: reference.Integers, seed: 1}),
				r.setUp(job{count: 1 << 18, kind: reference.Integers, seed: 2, absent: []int{1}}), // a BF16 wire: converted
				r.setUp(job{typ: allreduce.BF16, count: 300, kind: reference.Integers, seed: 3}),
			}
			graphs := r.graphPerDevice(func() {
				for _, p := range jobs {
					require.NoError(t, r.comm.AllReduce(p.bufs))
				}
			})
			const replays = 20
			done := make(chan error, ranks)
			for rank := range ranks {
				go func() {
					var err error
					for range replays {
						if err == nil {
							err = d.Launch(r.devices[rank], graphs[rank], r.streams[rank])
						}
					}
					if err == nil {
						err = d.Synchronize(r.devices[rank], r.streams[rank])
					}
					done <- err
				}()
			}
			for range ranks {
				require.NoError(t, <-done)
			}
			require.NoError(t, r.comm.AllReduce(jobs[0].bufs)) // and eager again
			r.sync()
			for _, p := range jobs {
				r.check(p)
			}
			r.destroy(graphs)
		}
		require.Zero(t, device.Hazards(), device.Report())
	})
}

// One of the graphs is not launched: within the deadline a typed error that says which ranks came, and Close returns.
func TestNCCLGraphThatIsAlone(t *testing.T) {
	lib := testnccl.Build(t)
	testbackend.Emulated(t, device.DefaultMachine(2), func(t *testing.T, d device.Driver) {
		const deadline = 300 * time.Millisecond
		r := newRig(t, d, allreduce.Config{Ranks: 2, NCCLLib: lib, Algorithm: allreduce.AlgorithmNCCL, SpinTimeout: deadline})
		p := r.setUp(job{count: 1000, kind: reference.Integers})
		graphs := r.graphPerDevice(func() { require.NoError(t, r.comm.AllReduce(p.bufs)) })
		for range 3 {
			for rank, g := range graphs {
				require.NoError(t, d.Launch(r.devices[rank], g, r.streams[rank]))
			}
		}
		r.sync()
		r.check(p)
		// The deadline is that of a wait, not of a graph that nobody launches.
		time.Sleep(2 * deadline)
		require.NoError(t, r.comm.Err())

		start := time.Now()
		require.NoError(t, d.Launch(r.devices[1], graphs[1], r.streams[1]))
		require.NoError(t, d.Synchronize(r.devices[1], r.streams[1]), "the abort ends it")
		took := time.Since(start)
		assert.Greater(t, took, deadline*9/10)
		assert.Less(t, took, 2*deadline)
		asError(t, r.comm.Err(), allreduce.ErrTimeout, "Err", "ranks that had begun it: 1; not: 0")
		require.ErrorIs(t, r.comm.AllReduce(p.bufs), allreduce.ErrTimeout)
		start = time.Now()
		require.NoError(t, r.comm.Close())
		assert.Less(t, time.Since(start), time.Second)
		// Both graphs are still there, and still end.
		require.NoError(t, d.Launch(r.devices[0], graphs[0], r.streams[0]))
		require.NoError(t, d.Synchronize(r.devices[0], r.streams[0]))
		r.destroy(graphs)
	})
}

// One graph of a pair is launched after Close: it waits for nobody.
func TestNCCLReplayAfterClose(t *testing.T) {
	lib := testnccl.Build(t)
	testbackend.Emulated(t, device.DefaultMachine(2), func(t *testing.T, d device.Driver) {
		r := newRig(t, d, allreduce.Config{Ranks: 2, NCCLLib: lib, Algorithm: allreduce.AlgorithmNCCL})
		p := r.setUp(job{count: 1 << 18, kind: reference.Integers})
		graphs := r.graphPerDevice(func() { require.NoError(t, r.comm.AllReduce(p.bufs)) })
		start := time.Now()
		require.NoError(t, r.comm.Close())
		assert.Less(t, time.Since(start), time.Second)
		require.NoError(t, d.Launch(r.devices[0], graphs[0], r.streams[0]))
		require.NoError(t, d.Synchronize(r.devices[0], r.streams[0]))
		assert.Less(t, time.Since(start), 5*time.Second)
		require.ErrorIs(t, r.comm.Err(), allreduce.ErrClosed)
		r.destroy(graphs)
		require.NoError(t, newRig(t, d, allreduce.Config{Ranks: 2}).comm.Close()) // frees what the graphs held
	})
}
