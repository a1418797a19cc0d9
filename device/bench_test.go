package device_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/testbackend"
)

func TestCopyKindAsync(t *testing.T) {
	testbackend.Each(t, 1, func(t *testing.T, d device.Driver) {
		const n = 1 << 16
		host, err := d.MallocHost(n)
		require.NoError(t, err)
		a, err := d.Malloc(0, n)
		require.NoError(t, err)
		b, err := d.Malloc(0, n)
		require.NoError(t, err)
		s, err := d.NewStream(0)
		require.NoError(t, err)
		in := make([]int32, n/4)
		for i := range in {
			in[i] = int32(i)
		}
		require.NoError(t, d.CopyToDevice(0, a, device.Bytes(in)))
		require.NoError(t, d.CopyKindAsync(0, host, a, n, device.DeviceToHost, s))
		require.NoError(t, d.CopyKindAsync(0, b, host, n/2, device.HostToDevice, s))
		require.NoError(t, d.CopyKindAsync(0, b+n/2, a+n/2, n/2, device.DeviceToDevice, s))
		require.NoError(t, d.Synchronize(0, s))
		out := make([]int32, n/4)
		require.NoError(t, d.CopyToHost(0, device.Bytes(out), b))
		assert.Equal(t, in, out)
		require.ErrorIs(t, d.CopyKindAsync(0, b, a, n, 3, s), device.ErrArgument)
		require.ErrorIs(t, d.CopyKindAsync(0, b, a, -1, device.DeviceToDevice, s), device.ErrArgument)
		require.NoError(t, d.DestroyStream(0, s))
		require.NoError(t, d.Free(0, a))
		require.NoError(t, d.Free(0, b))
		require.NoError(t, d.FreeHost(host))
	})
}

func TestCompare(t *testing.T) {
	testbackend.Each(t, 1, func(t *testing.T, d device.Driver) {
		const rows, count, pitch = 3, 70001, 70016 * 4
		fill := func() []float32 {
			v := make([]float32, rows*pitch/4)
			for i := range v {
				v[i] = float32(i)
			}
			return v
		}
		s, err := d.NewStream(0)
		require.NoError(t, err)
		var p [3]device.Ptr // got, want, counters
		for i, bytes := range []int64{rows * pitch, rows * pitch, device.CountersBytes} {
			p[i], err = d.Malloc(0, bytes)
			require.NoError(t, err)
		}
		wrong := func(typ int32, count int, tolerance float32, got []float32) int {
			require.NoError(t, d.CopyToDevice(0, p[0], device.Bytes(got)))
			require.NoError(t, d.CopyToDevice(0, p[1], device.Bytes(fill())))
			require.NoError(t, d.FillAsync(0, p[2], 0, device.CountersBytes, s))
			require.NoError(t, d.Compare(0, device.Rows{Got: p[0], Want: p[1], Rows: rows, Count: count, Pitch: pitch, Type: typ,
				Tolerance: tolerance}, p[2], s))
			require.NoError(t, d.Synchronize(0, s))
			counters := make([]uint32, device.CountersBytes/4)
			require.NoError(t, d.CopyToHost(0, device.Bytes(counters), p[2]))
			sum := 0
			for _, c := range counters {
				sum += int(c)
			}
			return sum
		}
		assert.Zero(t, wrong(0, count, 0, fill()))
		got := fill()
		got[0]++
		got[count-1]++
		got[count]++ // between two rows
		got[2*pitch/4+777]++
		assert.Equal(t, 3, wrong(0, count, 0, got))
		assert.Equal(t, 3, wrong(0, count, 0.5, got))
		assert.Zero(t, wrong(0, count, 1, got))
		assert.Equal(t, 3, wrong(2, 2*count, 0, got), "as pairs of 16-bit values, one of each differs: %d", count)
		require.ErrorIs(t, d.Compare(0, device.Rows{Got: p[0], Want: p[1], Rows: 2, Count: 9, Pitch: 4}, p[2], s), device.ErrArgument)
		require.NoError(t, d.DestroyStream(0, s))
		for _, q := range p {
			require.NoError(t, d.Free(0, q))
		}
	})
}

func TestLoad(t *testing.T) {
	testbackend.Each(t, 1, func(t *testing.T, d device.Driver) {
		info, err := d.Info(0)
		require.NoError(t, err)
		s, err := d.NewStream(0)
		require.NoError(t, err)
		events := make([]device.Event, 2)
		for i := range events {
			events[i], err = d.NewEvent(0)
			require.NoError(t, err)
		}
		// micros is the best of a few, warm.
		micros := func(blocks int) float64 {
			best := 1e9
			for range 4 {
				require.NoError(t, d.Record(0, events[0], s))
				require.NoError(t, d.Load(0, blocks, 1000, s))
				require.NoError(t, d.Record(0, events[1], s))
				require.NoError(t, d.Synchronize(0, s))
				us, err := d.ElapsedMicros(0, events[0], events[1])
				require.NoError(t, err)
				best = min(best, us)
			}
			return best
		}
		one := micros(info.SMs)
		assert.Greater(t, one, 50.0)
		assert.Less(t, one, 5000.0)
		assert.InEpsilon(t, 2, micros(info.SMs+1)/one, 0.15, "one block more is a second wave")
		require.ErrorIs(t, d.Load(0, 0, 1, s), device.ErrArgument)
		for _, e := range events {
			require.NoError(t, d.DestroyEvent(0, e))
		}
		require.NoError(t, d.DestroyStream(0, s))
	})
}

func TestTrace(t *testing.T) {
	testbackend.Each(t, 1, func(t *testing.T, d device.Driver) {
		const n = 1 << 20
		p, err := d.Malloc(0, 2*n)
		require.NoError(t, err)
		host, err := d.MallocHost(n)
		require.NoError(t, err)
		s, err := d.NewStream(0)
		require.NoError(t, err)
		graphed := func() device.Graph {
			require.NoError(t, d.BeginCapture(0, s))
			require.NoError(t, d.FillAsync(0, p, 1, n, s))
			g, err := d.EndCapture(0, s)
			require.NoError(t, err)
			return g
		}
		for range 2 { // the second drops what the first recorded
			require.NoError(t, d.TraceStart(0))
			require.NoError(t, d.CopyKindAsync(0, host, p, n, device.DeviceToHost, s))
			require.NoError(t, d.CopyKindAsync(0, p, host, n/2, device.HostToDevice, s))
			require.NoError(t, d.CopyAsync(0, p, p+n, n, s))
			require.NoError(t, d.Load(0, 1, 100, s))
			require.NoError(t, d.FillAsync(0, p, 1, n, s))
			g := graphed()
			records, err := d.TraceStop()
			require.NoError(t, err)
			require.NoError(t, d.CopyAsync(0, p, p+n, n, s)) // not recorded any more
			require.NoError(t, d.Synchronize(0, s))
			require.NoError(t, d.DestroyGraph(0, g))
			require.Len(t, records, 5)
			end := records[0].StartMicros
			for i, want := range []device.TraceRecord{
				{Kind: device.TraceDeviceToHost, Bytes: n, Name: "copy"},
				{Kind: device.TraceHostToDevice, Bytes: n / 2, Name: "copy"},
				{Kind: device.TraceDeviceToDevice, Bytes: n, Name: "copy"},
				{Kind: device.TraceKernel, Name: "load"},
				{Kind: device.TraceOther, Bytes: n, Name: "fill"},
			} {
				r := records[i]
				assert.Equal(t, want.Kind, r.Kind, r)
				assert.Equal(t, want.Bytes, r.Bytes, r)
				assert.Equal(t, want.Name, r.Name, r)
				assert.Equal(t, s, r.Stream)
				assert.Equal(t, 0, r.Device)
				assert.Greater(t, r.EndMicros, r.StartMicros, r)
				assert.GreaterOrEqual(t, r.StartMicros, end-1, "in stream order: %v", r) // events count in half microseconds
				end = r.EndMicros
				assert.Contains(t, r.String(), r.Kind.String())
			}
			require.Less(t, end-records[0].StartMicros, 1e5)
		}
		count, err := d.Count()
		require.NoError(t, err)
		require.ErrorIs(t, d.TraceStart(0, count), device.ErrNoDevice)
		require.NoError(t, d.DestroyStream(0, s))
		require.NoError(t, d.FreeHost(host))
		require.NoError(t, d.Free(0, p))
	})
}
