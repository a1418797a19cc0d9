package allreduce_test

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/reference"
	"gpu.example/allreduce/internal/testbackend"
)

// fork makes every other rank's stream wait for rank 0's, join the reverse: how a graph over all devices is captured and
// launched from one stream.
func (r *rig) fork() { r.order(0, true) }
func (r *rig) join() { r.order(0, false) }

func (r *rig) order(hub int, out bool) {
	r.t.Helper()
	for rank := range r.streams {
		from, to := hub, rank
		if !out {
			from, to = rank, hub
		}
		if from == to {
			continue
		}
		ev, err := r.d.NewEvent(r.devices[from])
		require.NoError(r.t, err)
		require.NoError(r.t, r.d.Record(r.devices[from], ev, r.streams[from]))
		require.NoError(r.t, r.d.WaitEvent(r.devices[to], r.streams[to], ev))
		r.t.Cleanup(func() { _ = r.d.DestroyEvent(r.devices[from], ev) })
	}
}

// capture captures what f enqueues on the rig's streams into one graph over all devices.
func (r *rig) capture(f func()) device.Graph {
	r.t.Helper()
	require.NoError(r.t, r.d.BeginCapture(r.devices[0], r.streams[0]))
	r.fork()
	f()
	r.join()
	g, err := r.d.EndCapture(r.devices[0], r.streams[0])
	require.NoError(r.t, err)
	r.t.Cleanup(func() { _ = r.d.DestroyGraph(r.devices[0], g) })
	return g
}

func (r *rig) launch(g device.Graph) {
	r.t.Helper()
	r.join()
	require.NoError(r.t, r.d.Launch(r.devices[0], g, r.streams[0]))
	r.fork()
}

func TestGraphOverAllDevices(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		for _, way := range ways {
			t.Run(way.name, func(t *testing.T) {
				cfg := way.cfg
				cfg.Ranks = 2
				r := newRig(t, d, cfg)
				var jobs []*prepared
				for i, count := range []int{300, 40000, 300001} {
					jobs = append(jobs, r.setUp(job{count: count, kind: reference.Specials, seed: uint64(i)}))
				}
				g := r.capture(func() {
					for range 2 { // more calls than slots
						for _, p := range jobs {
							require.NoError(t, r.comm.AllReduce(p.bufs))
						}
					}
				})
				assert.Equal(t, uint64(6), r.comm.Stats().Paths[way.path].Calls, "a captured call counts once")
				for replay := range 5 {
					r.launch(g)
					if replay%2 == 1 { // an eager call between replays, ordered on every rank's stream
						require.NoError(t, r.comm.AllReduce(jobs[1].bufs))
					}
				}
				r.sync()
				for _, p := range jobs {
					r.check(p)
				}
			})
		}
	})
}

// A graph per device: internal can, copy-engine says so and leaves captures and communicator as they were.
func TestGraphPerDevice(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		r := newRig(t, d, allreduce.Config{Ranks: 2})
		p := r.setUp(job{count: 5000, kind: reference.Specials})
		large := r.setUp(job{count: 300000, kind: reference.Specials})
		for rank, s := range r.streams {
			require.NoError(t, d.BeginCapture(r.devices[rank], s))
		}
		asError(t, r.comm.AllReduce(large.bufs), allreduce.ErrNotCapturable, "AllReduce", "copy-engine")
		require.NoError(t, r.comm.AllReduce(p.bufs))
		var graphs []device.Graph
		for rank, s := range r.streams {
			g, err := d.EndCapture(r.devices[rank], s)
			require.NoError(t, err)
			graphs = append(graphs, g)
		}
		for range 5 {
			for rank, g := range graphs {
				require.NoError(t, d.Launch(r.devices[rank], g, r.streams[rank]))
			}
		}
		r.sync()
		r.check(p)
		require.NoError(t, r.comm.AllReduce(large.bufs))
		r.sync()
		r.check(large)
		for rank, g := range graphs {
			require.NoError(t, d.DestroyGraph(r.devices[rank], g))
		}
	})
}

func TestMixedCapture(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		r := newRig(t, d, allreduce.Config{Ranks: 2})
		p := r.setUp(job{count: 100, kind: reference.Integers})
		require.NoError(t, d.BeginCapture(r.devices[1], r.streams[1]))
		asError(t, r.comm.AllReduce(p.bufs), allreduce.ErrCaptureMixed, "AllReduce")
		g, err := d.EndCapture(r.devices[1], r.streams[1])
		require.NoError(t, err, "the capture is intact")
		require.NoError(t, d.DestroyGraph(r.devices[1], g))
		require.NoError(t, r.comm.AllReduce(p.bufs))
		r.sync()
		r.check(p)
	})
}

// A replay after Close ends, touches no freed memory, and Err says why its result is not to be used.
func TestReplayAfterClose(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		for _, way := range ways {
			t.Run(way.name, func(t *testing.T) {
				cfg := way.cfg
				cfg.Ranks = 2
				r := newRig(t, d, cfg)
				p := r.setUp(job{count: 20000, kind: reference.Normal})
				g := r.capture(func() { require.NoError(t, r.comm.AllReduce(p.bufs)) })
				r.launch(g)
				for _, dev := range r.devices {
					require.NoError(t, d.SynchronizeDevice(dev))
				}
				r.check(p)
				require.NoError(t, r.comm.Close())
				r.launch(g)
				for _, dev := range r.devices {
					require.NoError(t, d.SynchronizeDevice(dev))
				}
				require.ErrorIs(t, r.comm.Err(), allreduce.ErrClosed)
			})
		}
		// What the graphs held is freed by the next communicator that comes or goes.
		require.NoError(t, newRig(t, d, allreduce.Config{Ranks: 2}).comm.Close())
	})
}

func TestThousandReplays(t *testing.T) {
	replays := 1000
	if testing.Short() {
		replays = 50
	}
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		r := newRig(t, d, allreduce.Config{Ranks: 2, CEMinBytes: 16 << 10, RingBytes: 1 << 20})
		small := r.setUp(job{count: 100, kind: reference.Specials, seed: 1})
		large := r.setUp(job{count: 9000, kind: reference.Specials, seed: 2})
		g := r.capture(func() {
			require.NoError(t, r.comm.AllReduce(small.bufs))
			require.NoError(t, r.comm.AllReduce(large.bufs))
		})
		for i := range replays {
			r.launch(g)
			if i%100 == 99 {
				r.sync()
				r.check(small)
				r.check(large)
			}
		}
		r.sync()
		r.check(small)
		r.check(large)
	})
}

// Graphs per device that do not belong together: each rank leaves a signature of what it replays, so the error names both
// instead of a wait that expired.
func TestGraphsDisagree(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		r := newRig(t, d, allreduce.Config{Ranks: 2, SpinTimeout: 20 * time.Second})
		graphs := make([][]device.Graph, 2)
		for i, count := range []int{100, 200} {
			p := r.setUp(job{count: count, kind: reference.Normal})
			for rank, s := range r.streams {
				require.NoError(t, d.BeginCapture(r.devices[rank], s))
			}
			require.NoError(t, r.comm.AllReduce(p.bufs))
			for rank, s := range r.streams {
				g, err := d.EndCapture(r.devices[rank], s)
				require.NoError(t, err)
				defer func() { _ = d.DestroyGraph(r.devices[rank], g) }()
				graphs[i] = append(graphs[i], g)
			}
		}
		launch := func(first, second int) {
			var wg sync.WaitGroup
			for rank, i := range []int{first, second} {
				wg.Go(func() { assert.NoError(t, d.Launch(r.devices[rank], graphs[i][rank], r.streams[rank])) })
			}
			wg.Wait()
		}
		for range 3 {
			launch(0, 0)
			launch(1, 1)
		}
		r.sync()
		require.NoError(t, r.comm.Err())
		launch(0, 1)
		var err error
		require.Eventually(t, func() bool { err = r.comm.Err(); return err != nil }, 10*time.Second, time.Millisecond)
		require.ErrorIs(t, err, allreduce.ErrMismatch)
		require.ErrorContains(t, err, "rank 0 is in call 0, sum of 100 f32 as f32, internal, captured; rank 1 is in call 1, sum of 200 f32 as f32, internal, captured")
		for rank, stream := range r.streams {
			require.NoError(t, d.Synchronize(r.devices[rank], stream), "the waits have ended")
		}
	})
}
