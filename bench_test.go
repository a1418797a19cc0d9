package allreduce_test

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/testbackend"
)

// hotCall gives the hot call as a program writes it: the slice literal inside.
func hotCall(comm *allreduce.Comm, p, q [2]device.Ptr, s []device.Stream, count int) func() error {
	return func() error {
		return comm.AllReduce([]allreduce.Buffer{
			{Send: p[0], Recv: q[0], Count: count, Stream: s[0]},
			{Send: p[1], Recv: q[1], Count: count, Stream: s[1]},
		})
	}
}

// The promise of the hot path: no Go allocation, the literal included, and one cgo call a reduction, whatever the path.
func TestHotPathCosts(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		for _, count := range []int{0, 1024, 262144} {
			r := newRig(t, d, allreduce.Config{Ranks: 2, RingBytes: 1 << 20})
			var p, q [2]device.Ptr
			for rank := range 2 {
				p[rank], q[rank] = r.malloc(rank, 1<<20), r.malloc(rank, 1<<20)
			}
			call := hotCall(r.comm, p, q, r.streams, count)
			for range 4 {
				require.NoError(t, call())
			}
			const calls = 100
			before := runtime.NumCgoCall()
			for range calls {
				if err := call(); err != nil {
					t.Fatal(err)
				}
			}
			require.Equal(t, int64(calls), runtime.NumCgoCall()-before, "%d elements", count)
			r.wait()
			require.Zero(t, testing.AllocsPerRun(calls, func() {
				if err := call(); err != nil {
					t.Fatal(err)
				}
			}), "%d elements", count)
			r.wait()
		}
	})
}

// BenchmarkAllReduceCall measures the host's time for one call, with NoOp, so that what is left is Go, cgo and the checks.
func BenchmarkAllReduceCall(b *testing.B) {
	require.NoError(b, device.Configure(device.DefaultMachine(2), true))
	d, err := device.Open(device.Emulated)
	require.NoError(b, err)
	comm, err := allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: 2, NoOp: allreduce.On})
	require.NoError(b, err)
	defer comm.Close()
	var p, q [2]device.Ptr
	var s []device.Stream
	for rank := range 2 {
		p[rank], err = d.Malloc(rank, 4096)
		require.NoError(b, err)
		q[rank], err = d.Malloc(rank, 4096)
		require.NoError(b, err)
		stream, err := d.NewStream(rank)
		require.NoError(b, err)
		s = append(s, stream)
	}
	b.ReportAllocs()
	before := runtime.NumCgoCall()
	for b.Loop() {
		err := comm.AllReduce([]allreduce.Buffer{
			{Send: p[0], Recv: q[0], Count: 1024, Stream: s[0]},
			{Send: p[1], Recv: q[1], Count: 1024, Stream: s[1]},
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(runtime.NumCgoCall()-before)/float64(b.N), "cgo/op")
}

// BenchmarkRoute measures the look-up alone.
func BenchmarkRoute(b *testing.B) {
	require.NoError(b, device.Configure(device.DefaultMachine(2), true))
	comm, err := allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: 2})
	require.NoError(b, err)
	defer comm.Close()
	b.ReportAllocs()
	for b.Loop() {
		_ = comm.Route(1<<20, allreduce.F32, allreduce.Sum)
	}
}
