package allreduce_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/core"
	"gpu.example/allreduce/internal/reference"
	"gpu.example/allreduce/internal/testbackend"
)

// asError demands a typed error that unwraps to the sentinel, names the operation and says every word.
func asError(t *testing.T, err, sentinel error, op string, words ...string) {
	t.Helper()
	require.ErrorIs(t, err, sentinel)
	var e *allreduce.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, op, e.Op)
	for _, word := range words {
		assert.Contains(t, err.Error(), word)
	}
}

func TestNewRefuses(t *testing.T) {
	testbackend.Emulated(t, device.DefaultMachine(2), func(t *testing.T, _ device.Driver) {
		emulated := func(cfg allreduce.Config) error {
			cfg.Backend = allreduce.BackendEmulated
			c, err := allreduce.New(cfg)
			assert.Nil(t, c)
			return err
		}
		err := emulated(allreduce.Config{Ranks: 3})
		asError(t, err, allreduce.ErrNoDevice, "New", "device 2", "has 2", "Config.Devices")
		var e *allreduce.Error
		require.ErrorAs(t, err, &e)
		assert.Equal(t, 2, e.Rank)
		assert.Equal(t, 2, e.Device)
		asError(t, emulated(allreduce.Config{Devices: []int{0, 5}}), allreduce.ErrNoDevice, "New", "device 5")
		asError(t, emulated(allreduce.Config{Devices: []int{}}), allreduce.ErrSetting, "New", "Config.Devices")
		asError(t, emulated(allreduce.Config{Ranks: 9}), allreduce.ErrSetting, "New", "Config.Ranks=9", "8")
		asError(t, emulated(allreduce.Config{Ranks: 2, Algorithm: allreduce.AlgorithmNCCL}), allreduce.ErrNCCL, "New", "GGML_CUDA_ALLREDUCE=nccl")
		asError(t, emulated(allreduce.Config{Ranks: 2, Algorithm: allreduce.AlgorithmPeer}), allreduce.ErrUnsupported, "New", "GGML_CUDA_ALLREDUCE=peer")
		asError(t, emulated(allreduce.Config{Ranks: 2, Algorithm: allreduce.AlgorithmCopyEngine, CopyEngine: allreduce.Off}), allreduce.ErrSetting, "New", "GGML_CUDA_AR_CE=0")
		t.Setenv("GGML_CUDA_AR_CE", "maybe")
		asError(t, emulated(allreduce.Config{Ranks: 2}), allreduce.ErrSetting, "New", "GGML_CUDA_AR_CE", `"maybe"`, "0, 1, true")
	})
}

// A library never hands out simulated GPUs unasked.
func TestAutoIsCUDA(t *testing.T) {
	c, err := allreduce.New(allreduce.Config{})
	if err == nil {
		assert.Equal(t, allreduce.BackendCUDA, c.Backend())
		require.NoError(t, c.Close())
		return
	}
	assert.True(t, errors.Is(err, allreduce.ErrBackend) || errors.Is(err, allreduce.ErrNoDevice) || errors.Is(err, allreduce.ErrRuntime), "%v", err)
}

func TestBuildInfo(t *testing.T) {
	assert.Equal(t, allreduce.Backends(), allreduce.BuildInfo().Backends)
	assert.Contains(t, allreduce.Backends(), allreduce.BackendEmulated)
	assert.Equal(t, core.Version(), allreduce.Version(), "Go and the C core are of one version")
}

func TestBuffersAreChecked(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		r := newRig(t, d, allreduce.Config{Ranks: 2})
		p := r.setUp(job{count: 1000, kind: reference.Integers})
		change := func(f func(b []allreduce.Buffer)) error {
			bufs := []allreduce.Buffer{p.bufs[0], p.bufs[1]}
			f(bufs)
			return r.comm.AllReduce(bufs)
		}
		for _, c := range []struct {
			words []string
			f     func(b []allreduce.Buffer)
		}{
			{[]string{"rank 1", "1000", "999"}, func(b []allreduce.Buffer) { b[1].Count = 999 }},
			{[]string{"rank 1", "1000", "count is 0"}, func(b []allreduce.Buffer) { b[0].Count = 0 }},
			{[]string{"-1"}, func(b []allreduce.Buffer) { b[0].Count, b[1].Count = -1, -1 }},
			{[]string{"4611686018427387904"}, func(b []allreduce.Buffer) { b[0].Count, b[1].Count = 1<<62, 1<<62 }},
			{[]string{"f32", "bf16"}, func(b []allreduce.Buffer) { b[1].Type = allreduce.BF16 }},
			{[]string{"type(99)"}, func(b []allreduce.Buffer) { b[0].Type, b[1].Type = 99, 99 }},
			{[]string{"op"}, func(b []allreduce.Buffer) { b[1].Op = allreduce.Avg }},
			{[]string{"op(7)"}, func(b []allreduce.Buffer) { b[0].Op, b[1].Op = 7, 7 }},
			{[]string{"rows"}, func(b []allreduce.Buffer) { b[1].Rows = 2 }},
			{[]string{"rank 0", "Rows is -1"}, func(b []allreduce.Buffer) { b[0].Rows = -1 }},
			{[]string{"7 rows", "1000"}, func(b []allreduce.Buffer) { b[0].Rows, b[1].Rows = 7, 7 }},
			{[]string{"rank 1", "send is 0"}, func(b []allreduce.Buffer) { b[1].Send = 0 }},
			{[]string{"rank 0", "recv is 0"}, func(b []allreduce.Buffer) { b[0].Recv = 0 }},
			{[]string{"rank 0", "overlap"}, func(b []allreduce.Buffer) { b[0].Recv = b[0].Send + 16 }},
			{[]string{"rank 0", "aligned"}, func(b []allreduce.Buffer) { b[0].Send += 2 }},
			{[]string{"rank 1", "pitch"}, func(b []allreduce.Buffer) { b[0].Rows, b[1].Rows = 2, 2; b[1].RecvPitch = 100 }},
		} {
			err := change(c.f)
			asError(t, err, allreduce.ErrArgument, "AllReduce", c.words...)
		}
		asError(t, r.comm.AllReduce(p.bufs[:1]), allreduce.ErrArgument, "AllReduce", "1 buffers for 2 ranks")
		asError(t, r.comm.AllReduce(nil), allreduce.ErrArgument, "AllReduce", "0 buffers")
		asError(t, change(func(b []allreduce.Buffer) { b[0].Type, b[1].Type = allreduce.I32, allreduce.I32 }), allreduce.ErrUnsupported, "AllReduce", "i32")
		if d.Backend() == device.Emulated {
			for _, bad := range []device.Ptr{4096, p.bufs[1].Send, p.bufs[0].Send + 4096} {
				asError(t, change(func(b []allreduce.Buffer) { b[0].Send = bad }), allreduce.ErrArgument, "AllReduce", "rank 0", "send")
			}
		}
		// Nothing was enqueued and the communicator is good.
		assert.Zero(t, r.comm.Stats().Paths[allreduce.PathInternal].Calls)
		require.NoError(t, r.comm.AllReduce(p.bufs))
		r.sync()
		r.check(p)
	})
}

func TestNoElements(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		for _, cfg := range []allreduce.Config{{Ranks: 2}, {Ranks: 2, CEMinBytes: 1}, {Ranks: 2, Algorithm: allreduce.AlgorithmInternal}} {
			r := newRig(t, d, cfg)
			require.NoError(t, r.comm.AllReduce(make([]allreduce.Buffer, 2)), "no pointers are needed")
			assert.Equal(t, uint64(1), r.comm.Stats().Paths[allreduce.PathNone].Calls)
			assert.Equal(t, allreduce.PathNone, r.comm.Route(0, allreduce.F32, allreduce.Sum).Path)
			require.NoError(t, r.comm.Wait(context.Background()))
		}
	})
}

func TestDisabled(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		t.Setenv("GGML_CUDA_ALLREDUCE", "none")
		r := newRig(t, d, allreduce.Config{Ranks: 2})
		err := r.comm.AllReduce([]allreduce.Buffer{{Count: 4}, {Count: 4}})
		asError(t, err, allreduce.ErrDisabled, "AllReduce", "GGML_CUDA_ALLREDUCE=none")
		route := r.comm.Route(16, allreduce.F32, allreduce.Sum)
		assert.Equal(t, allreduce.PathNone, route.Path)
		assert.Contains(t, route.Reason, "GGML_CUDA_ALLREDUCE=none")
	})
}

func TestNoOp(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		var log bytes.Buffer
		r := newRig(t, d, allreduce.Config{Ranks: 2, NoOp: allreduce.On, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		p := r.setUp(job{count: 100, kind: reference.Integers})
		require.NoError(t, r.comm.AllReduce(p.bufs))
		r.wait()
		got := make([]byte, p.bytes)
		require.NoError(t, d.CopyToHost(r.devices[0], got, p.recv[0]))
		assert.Equal(t, p.guard[0], got, "nothing was moved")
		require.Len(t, r.comm.Stats().Warnings, 1)
		assert.Contains(t, r.comm.Stats().Warnings[0], "wrong on purpose")
		assert.Contains(t, log.String(), "wrong on purpose")
	})
}

func TestClose(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		r := newRig(t, d, allreduce.Config{Ranks: 2})
		p := r.setUp(job{count: 1 << 20, kind: reference.Normal})
		require.NoError(t, r.comm.AllReduce(p.bufs))
		require.NoError(t, r.comm.Close(), "waits for the reduction")
		r.check(p)
		require.NoError(t, r.comm.Close())
		asError(t, r.comm.AllReduce(p.bufs), allreduce.ErrClosed, "AllReduce")
		asError(t, r.comm.Wait(context.Background()), allreduce.ErrClosed, "Wait")
		asError(t, r.comm.Prepare(1), allreduce.ErrClosed, "Prepare")
		asError(t, r.comm.Err(), allreduce.ErrClosed, "Err")
		s := r.comm.Stats()
		assert.Equal(t, uint64(1), s.Paths[allreduce.PathCopyEngine].Calls)
		assert.Zero(t, s.Ranks[0].PinnedBytes[allreduce.PathInternal])
		assert.Equal(t, 2, r.comm.Ranks())
		assert.Equal(t, allreduce.PathInternal, r.comm.Route(16, allreduce.F32, allreduce.Sum).Path)
	})
	var none *allreduce.Comm
	require.ErrorIs(t, none.AllReduce(nil), allreduce.ErrClosed)
	require.NoError(t, none.Close())
	require.ErrorIs(t, new(allreduce.Comm).Wait(context.Background()), allreduce.ErrClosed)
}

// Goroutines that reduce, ask and close at once: no crash, no race, and every error is ErrClosed.
func TestConcurrentUse(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		r := newRig(t, d, allreduce.Config{Ranks: 2, CEMinBytes: 16 << 10, RingBytes: 1 << 20})
		var jobs []*prepared
		for i := range 8 {
			jobs = append(jobs, r.setUp(job{count: []int{10, 1000, 5000, 100000}[i%4], kind: reference.Normal, seed: uint64(i)}))
		}
		var group sync.WaitGroup
		for _, p := range jobs {
			group.Go(func() {
				for range 20 {
					if !assert.NoError(t, r.comm.AllReduce(p.bufs)) {
						return
					}
					_ = r.comm.Stats()
					assert.NoError(t, r.comm.Err())
				}
				assert.NoError(t, r.comm.Wait(context.Background()))
			})
		}
		group.Wait()
		r.sync()
		for _, p := range jobs {
			r.check(p)
		}
		for _, p := range jobs {
			group.Go(func() {
				for {
					if err := r.comm.AllReduce(p.bufs); err != nil {
						assert.ErrorIs(t, err, allreduce.ErrClosed)
						return
					}
				}
			})
		}
		time.Sleep(5 * time.Millisecond)
		assert.NoError(t, r.comm.Close())
		group.Wait()
		// What was still running at Close is freed by the next communicator that comes or goes.
		for _, dev := range r.devices {
			require.NoError(t, d.SynchronizeDevice(dev))
		}
		require.NoError(t, newRig(t, d, allreduce.Config{Ranks: 2}).comm.Close())
	})
}

func TestWaitHonoursContext(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		r := newRig(t, d, allreduce.Config{Ranks: 2})
		p := r.setUp(job{count: 4 << 20, kind: reference.Normal})
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		require.NoError(t, r.comm.AllReduce(p.bufs))
		if err := r.comm.Wait(ctx); err != nil { // it may have ended already
			asError(t, err, context.Canceled, "Wait")
		}
		ctx, cancel = context.WithTimeout(context.Background(), time.Nanosecond)
		defer cancel()
		if err := r.comm.Wait(ctx); err != nil {
			asError(t, err, context.DeadlineExceeded, "Wait")
		}
		r.wait()
		r.check(p)
	})
}

// The copy engines' memory cannot be had: internal takes over at once and for good, one line says so, bits are right.
func TestAllocationFallsBack(t *testing.T) {
	m := device.DefaultMachine(2)
	m.Devices[1].MemoryBytes = 40 << 20
	testbackend.Emulated(t, m, func(t *testing.T, d device.Driver) {
		var log bytes.Buffer
		r := newRig(t, d, allreduce.Config{Ranks: 2, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		hog, err := d.Malloc(1, 36<<20)
		require.NoError(t, err)
		p := r.setUp(job{count: 200000, kind: reference.Specials, inPlace: true})
		assert.Equal(t, allreduce.PathCopyEngine, p.path)
		require.NoError(t, r.comm.AllReduce(p.bufs))
		r.sync()
		s := r.comm.Stats()
		assert.Equal(t, uint64(1), s.Paths[allreduce.PathInternal].Calls)
		assert.Zero(t, s.Paths[allreduce.PathCopyEngine].Calls)
		assert.Zero(t, s.Ranks[0].DeviceBytes[allreduce.PathCopyEngine], "what was half allocated is given back")
		require.Len(t, s.Warnings, 1)
		assert.Contains(t, s.Warnings[0], "copy-engine is given up")
		assert.Contains(t, s.Warnings[0], "internal serves")
		assert.Equal(t, 1, strings.Count(log.String(), "given up"))

		route := r.comm.RouteFor(p.bufs[0])
		assert.Equal(t, allreduce.PathInternal, route.Path)
		assert.Contains(t, route.Reason, "could not be allocated")
		for _, routes := range s.Routes {
			for _, b := range routes.Bands {
				assert.NotEqual(t, allreduce.PathCopyEngine, b.Path)
			}
		}
		r.run(job{count: 200000, kind: reference.Specials, inPlace: true})
		assert.Equal(t, 1, strings.Count(log.String(), "given up"))

		// With memory free again, Prepare brings the path back.
		require.NoError(t, d.Free(1, hog))
		require.NoError(t, r.comm.Prepare(1<<20, allreduce.F32))
		assert.Equal(t, allreduce.PathCopyEngine, r.run(job{count: 200000, kind: reference.Specials, inPlace: true}).path)
	})
}

func TestPrepare(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		r := newRig(t, d, allreduce.Config{Ranks: 2})
		require.NoError(t, r.comm.Prepare(1024))
		assert.Zero(t, r.comm.Stats().Ranks[0].DeviceBytes[allreduce.PathCopyEngine], "small reductions need none")
		require.NoError(t, r.comm.Prepare(16<<20, allreduce.F32))
		s := r.comm.Stats()
		assert.Positive(t, s.Ranks[0].DeviceBytes[allreduce.PathCopyEngine])
		r.run(job{count: 4 << 20, kind: reference.Normal})
		assert.Equal(t, s.Allocations, r.comm.Stats().Allocations, "nothing was allocated lazily")
		asError(t, r.comm.Prepare(-1), allreduce.ErrArgument, "Prepare", "-1")
		asError(t, r.comm.Prepare(16, 99), allreduce.ErrArgument, "Prepare", "type(99)")
		asError(t, r.comm.Prepare(16, allreduce.I64), allreduce.ErrUnsupported, "Prepare", "i64")
	})
}

func TestTrace(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		var log bytes.Buffer
		logger := slog.New(slog.NewTextHandler(&log, nil))
		t.Setenv("GGML_CUDA_AR_TRACE", "3")
		r := newRig(t, d, allreduce.Config{Ranks: 2, Logger: logger})
		for _, count := range []int{16, 1 << 20, 32, 64} {
			r.run(job{count: count, kind: reference.Normal})
		}
		text := log.String()
		assert.Equal(t, 3, strings.Count(text, "reason="), text)
		assert.Contains(t, text, "path=internal wire=f32 bytes=64")
		assert.Contains(t, text, "path=copy-engine wire=bf16 bytes=4194304")
		assert.Contains(t, text, "chunks=")
		assert.Equal(t, 1, strings.Count(text, "memory allocated"), text)
		assert.NotContains(t, text, "bytes=256 ")
	})
}

func TestUnknownVariableWarns(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		t.Setenv("GGML_CUDA_AR_CE_MINBYTES", "1")
		r := newRig(t, d, allreduce.Config{Ranks: 2})
		require.Len(t, r.comm.Stats().Warnings, 1)
		assert.Contains(t, r.comm.Stats().Warnings[0], "GGML_CUDA_AR_CE_MIN_BYTES")
	})
}

func TestMachineFile(t *testing.T) {
	testbackend.Emulated(t, device.DefaultMachine(1), func(t *testing.T, d device.Driver) {
		path := filepath.Join(t.TempDir(), "machine.json")
		require.NoError(t, os.WriteFile(path, []byte(`{"devices": [{"h2d_gbs": 12, "d2h_gbs": 12, "duplex_gbs": 11}, {}, {}]}`), 0o600))
		t.Setenv("GGML_CUDA_AR_EMULATED", path)
		r := newRig(t, d, allreduce.Config{})
		assert.Equal(t, []int{0, 1, 2}, r.comm.Devices(), "one rank per device")
		assert.Equal(t, 12.0, device.CurrentMachine().Devices[0].H2DGBs)
		assert.Empty(t, r.comm.Stats().Warnings)
		newRig(t, d, allreduce.Config{Ranks: 2}) // the same machine again: fine while it is in use

		other := filepath.Join(t.TempDir(), "other.json")
		require.NoError(t, os.WriteFile(other, []byte(`{"devices": [{}, {}]}`), 0o600))
		_, err := allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Emulated: other})
		asError(t, err, allreduce.ErrSetting, "New", other, "another emulated machine")
		_, err = allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Emulated: other + ".none"})
		asError(t, err, allreduce.ErrSetting, "New", "GGML_CUDA_AR_EMULATED", other+".none")
	})
}

// A communicator that nobody closed is reported, not freed: closing could block the goroutine of all cleanups.
func TestLeakAlarm(t *testing.T) {
	if choice := os.Getenv("AR_TEST_BACKEND"); choice == "cuda" {
		t.Skip("emulated devices only, and AR_TEST_BACKEND=cuda")
	}
	require.NoError(t, device.Configure(device.DefaultMachine(2), true))
	log := &lockedBuffer{}
	func() {
		_, err := allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: 2, Logger: slog.New(slog.NewTextHandler(log, nil))})
		require.NoError(t, err)
		closed, err := allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: 2, Logger: slog.New(slog.NewTextHandler(log, nil))})
		require.NoError(t, err)
		require.NoError(t, closed.Close())
	}()
	require.Eventually(t, func() bool {
		runtime.GC()
		return strings.Contains(log.String(), "dropped without Close")
	}, 10*time.Second, 10*time.Millisecond)
	runtime.GC()
	assert.Equal(t, 1, strings.Count(log.String(), "dropped without Close"))
	require.NoError(t, device.Configure(device.DefaultMachine(2), true))
}

type lockedBuffer struct {
	mutex sync.Mutex
	text  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.text.String()
}
