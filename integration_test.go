package allreduce_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/reference"
	"gpu.example/allreduce/internal/testbackend"
)

// ways are the settings that lead every size over one path and wire.
var ways = []struct {
	name string
	cfg  allreduce.Config
	path allreduce.Path
	wire allreduce.Type
}{
	{"internal f32", allreduce.Config{Algorithm: allreduce.AlgorithmInternal}, allreduce.PathInternal, allreduce.F32},
	{"internal bf16", allreduce.Config{Algorithm: allreduce.AlgorithmInternal, Wire: allreduce.WireBF16}, allreduce.PathInternal, allreduce.BF16},
	{"copy-engine bf16", allreduce.Config{CEMinBytes: 1, RingBytes: 1 << 20, CopyChunkBytes: 64 << 10}, allreduce.PathCopyEngine, allreduce.BF16},
	{"copy-engine f32", allreduce.Config{CEMinBytes: 1, RingBytes: 1 << 20, BF16Threshold: allreduce.BF16Never}, allreduce.PathCopyEngine, allreduce.F32},
	{"copy-engine f16", allreduce.Config{Algorithm: allreduce.AlgorithmCopyEngine, RingBytes: 1 << 20, CopyChunkBytes: 96 << 10, Wire: allreduce.WireF16}, allreduce.PathCopyEngine, allreduce.F16},
}

// Sizes in elements: the ends of vectors and blocks, the border, two small rings and a chunk and an odd tail.
var counts = []int{1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 255, 1000, 4096, 16383, 65536, 131071, 131072, 600001}

func TestEverySize(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		for _, way := range ways {
			t.Run(way.name, func(t *testing.T) {
				cfg := way.cfg
				cfg.Ranks = 2
				r := newRig(t, d, cfg)
				for i, count := range counts {
					for _, inPlace := range []bool{false, true} {
						p := r.run(job{count: count, kind: reference.Specials, seed: uint64(i), inPlace: inPlace})
						assert.Equal(t, way.path, p.path)
						assert.Equal(t, way.wire, p.wire)
					}
				}
				s := r.comm.Stats()
				assert.Equal(t, uint64(2*len(counts)), s.Paths[way.path].Calls)
				assert.Empty(t, s.Warnings)
			})
		}
	})
}

func TestLayouts(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		for _, way := range ways {
			t.Run(way.name, func(t *testing.T) {
				cfg := way.cfg
				cfg.Ranks = 2
				r := newRig(t, d, cfg)
				for _, count := range []int{6, 1026, 50001 * 6} {
					base := job{count: count, kind: reference.Specials, seed: 3}
					for _, change := range []func(j *job){
						func(j *job) { j.absent = []int{0} },
						func(j *job) { j.absent = []int{1}; j.inPlace = true },
						func(j *job) { j.absent = []int{0, 1} },
						func(j *job) { j.sendOff = 4; j.recvOff = 12 },
						func(j *job) { j.sendOff = 8; j.inPlace = true },
						func(j *job) { j.op = allreduce.Avg },
						func(j *job) { j.op = allreduce.Avg; j.absent = []int{1} },
						func(j *job) { j.rows = 3 },
						func(j *job) { j.rows = 3; j.gapBytes = 4 },
						func(j *job) { j.rows = 6; j.gapBytes = 20; j.sendOff = 4; j.absent = []int{0} },
						func(j *job) { j.rows = 2; j.gapBytes = 16; j.inPlace = true },
						func(j *job) { j.defaultQueue = true },
						func(j *job) { j.typ = allreduce.F16 },
						func(j *job) { j.typ = allreduce.F16; j.sendOff = 2; j.recvOff = 6; j.op = allreduce.Avg },
						func(j *job) { j.typ = allreduce.BF16; j.inPlace = true },
						func(j *job) { j.typ = allreduce.BF16; j.rows = 3; j.gapBytes = 2 },
					} {
						j := base
						change(&j)
						r.run(j)
					}
				}
			})
		}
	})
}

// With defaults: the border, and what it does to path, wire and memory.
func TestDefaultRoutes(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		r := newRig(t, d, allreduce.Config{Ranks: 2})
		p := r.run(job{count: 131071, seed: 1})
		assert.Equal(t, allreduce.PathInternal, p.path)
		assert.Equal(t, allreduce.F32, p.wire)
		for _, rank := range r.comm.Stats().Ranks {
			assert.Zero(t, rank.DeviceBytes[allreduce.PathCopyEngine], "no copy-engine memory before the first large reduction")
			assert.Zero(t, rank.PinnedBytes[allreduce.PathCopyEngine])
			assert.Positive(t, rank.PinnedBytes[allreduce.PathInternal])
			assert.LessOrEqual(t, rank.PinnedBytes[allreduce.PathInternal], int64(4<<20))
		}
		for _, count := range []int{131072, 4 << 20} {
			p = r.run(job{count: count, seed: 1})
			assert.Equal(t, allreduce.PathCopyEngine, p.path)
			assert.Equal(t, allreduce.BF16, p.wire)
		}
		s := r.comm.Stats()
		assert.Equal(t, uint64(1), s.Paths[allreduce.PathInternal].Calls)
		assert.Equal(t, uint64(524284), s.Paths[allreduce.PathInternal].Bytes)
		assert.Equal(t, uint64(2), s.Paths[allreduce.PathCopyEngine].Calls)
		assert.Positive(t, s.Allocations)
		assert.Positive(t, s.CopyChunkBytes)
		for i, rank := range s.Ranks {
			assert.Equal(t, i, rank.Rank)
			assert.Equal(t, r.devices[i], rank.Device)
			assert.Positive(t, rank.DeviceBytes[allreduce.PathCopyEngine])
			assert.LessOrEqual(t, rank.DeviceBytes[allreduce.PathCopyEngine], int64(16<<20))
			assert.Positive(t, rank.PinnedBytes[allreduce.PathCopyEngine])
			assert.LessOrEqual(t, rank.PinnedBytes[allreduce.PathCopyEngine], int64(8<<20))
		}
		require.NotEmpty(t, s.Routes)
		assert.Equal(t, allreduce.F32, s.Routes[0].Type)
		assert.Equal(t, allreduce.PathInternal, s.Routes[0].Bands[1].Path)
		assert.Equal(t, int64(524287), s.Routes[0].Bands[1].MaxBytes)
	})
}

func TestCopyEnginesOff(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		t.Setenv("GGML_CUDA_AR_CE", "0")
		r := newRig(t, d, allreduce.Config{Ranks: 2})
		p := r.run(job{count: 1 << 20, seed: 1})
		assert.Equal(t, allreduce.PathInternal, p.path)
		assert.Contains(t, r.comm.RouteFor(p.bufs[0]).Reason, "GGML_CUDA_AR_CE=0")
		assert.Zero(t, r.comm.Stats().Paths[allreduce.PathCopyEngine].Calls)
	})
}

func TestOneRank(t *testing.T) {
	testbackend.Each(t, 1, func(t *testing.T, d device.Driver) {
		r := newRig(t, d, allreduce.Config{Ranks: 1})
		for _, j := range []job{
			{count: 1000, kind: reference.Specials},
			{count: 1000, kind: reference.Specials, inPlace: true},
			{count: 1000, kind: reference.Specials, absent: []int{0}},
			{count: 999, kind: reference.Specials, rows: 3, gapBytes: 8},
			{count: 1 << 18, kind: reference.Specials, op: allreduce.Avg, sendOff: 4, recvOff: 8},
			{count: 100, typ: allreduce.BF16, kind: reference.Specials},
		} {
			assert.Equal(t, allreduce.PathNone, r.run(j).path)
		}
	})
}

// More ranks than the two this version is made for: the same code, so it must be right as well. On two GPUs the ranks
// share them.
func TestMoreRanks(t *testing.T) {
	for _, ranks := range []int{3, 4, 8} {
		test := func(t *testing.T, d device.Driver) {
			n, err := d.Count()
			require.NoError(t, err)
			for _, way := range ways {
				cfg := way.cfg
				for rank := range ranks {
					cfg.Devices = append(cfg.Devices, rank%n)
				}
				r := newRig(t, d, cfg)
				for _, count := range []int{1, 5, 1000, 70001} {
					r.run(job{count: count, kind: reference.Specials, seed: 9})
					r.run(job{count: count, kind: reference.Normal, op: allreduce.Avg, seed: 9, absent: []int{0, ranks - 1}})
				}
			}
		}
		t.Run(fmt.Sprint(ranks), func(t *testing.T) {
			t.Run("emulated", func(t *testing.T) { testbackend.Emulated(t, device.DefaultMachine(ranks), test) })
			t.Run("emulated, shared", func(t *testing.T) { testbackend.Emulated(t, device.DefaultMachine(2), test) })
			t.Run("cuda", func(t *testing.T) { testbackend.CUDA(t, 2, test) })
		})
	}
}

// Two ranks on one device: one launch serves both.
func TestSharedDevice(t *testing.T) {
	testbackend.Each(t, 1, func(t *testing.T, d device.Driver) {
		for _, way := range ways {
			t.Run(way.name, func(t *testing.T) {
				cfg := way.cfg
				cfg.Devices = []int{0, 0}
				r := newRig(t, d, cfg)
				for _, count := range []int{1, 1000, 300001} {
					r.run(job{count: count, kind: reference.Specials, seed: 5})
				}
			})
		}
	})
}

// Many reductions in flight, of mixed sizes and on changing streams, nothing synchronised in between.
func TestBackToBack(t *testing.T) {
	testbackend.Each(t, 2, func(t *testing.T, d device.Driver) {
		r := newRig(t, d, allreduce.Config{Ranks: 2, CEMinBytes: 64 << 10, RingBytes: 1 << 20})
		other := newRig(t, d, allreduce.Config{Ranks: 2}) // for its streams
		var all []*prepared
		for i := range 60 {
			j := job{count: []int{3, 5000, 20000, 300000}[i%4], seed: uint64(i), kind: reference.Normal, inPlace: i%3 == 0}
			p := r.setUp(j)
			if i%5 == 0 {
				for rank := range p.bufs {
					p.bufs[rank].Stream = other.streams[rank]
				}
			}
			all = append(all, p)
		}
		for _, p := range all {
			require.NoError(t, r.comm.AllReduce(p.bufs))
		}
		r.wait()
		for _, p := range all {
			r.check(p)
		}
	})
}

// The same inputs, reduced where earlier calls left their traces, give the same bits every time; the simulated machine
// runs what it can in any order.
func TestSchedules(t *testing.T) {
	seeds := 40
	if testing.Short() {
		seeds = 4
	}
	for _, schedule := range []device.Schedule{device.FIFO, device.Random, device.Adversarial, device.Priorities} {
		t.Run(schedule.String(), func(t *testing.T) {
			for seed := range uint64(seeds) {
				m := device.DefaultMachine(2)
				m.Drive, m.Schedule, m.Seed = device.Stepped, schedule, seed
				testbackend.Emulated(t, m, func(t *testing.T, d device.Driver) {
					t.Run(fmt.Sprint(seed), func(t *testing.T) {
						r := newRig(t, d, allreduce.Config{Ranks: 2, CEMinBytes: 32 << 10, RingBytes: 1 << 20, CopyChunkBytes: 64 << 10})
						var all []*prepared
						for i := range 4 {
							all = append(all, r.setUp(job{count: []int{100, 7000, 40000, 1<<19 + 5}[(i+int(seed))%4], kind: reference.Specials, seed: seed, inPlace: i%2 == 1}))
							require.NoError(t, r.comm.AllReduce(all[i].bufs))
						}
						r.sync()
						for _, p := range all {
							r.check(p)
						}
					})
				})
			}
		})
	}
}
