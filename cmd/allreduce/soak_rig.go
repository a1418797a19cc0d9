package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/reference"
)

// soakRig is what a soak holds: communicators, two streams per rank, inputs with their expected results, and memory for
// results.
type soakRig struct {
	*session // of the first lane; its streams are set 0
	job      *soakJob
	lanes    []lane
	skipped  []soakSkipped
	streams  [streamSets][]device.Stream // [set][rank]
	events   [streamSets][]device.Event  // recorded outside captures only
	captured [streamSets][]device.Event  // recorded inside captures only
	poolSize int64
	pools    map[poolKey]*pool
	wants    map[wantKey][]device.Ptr // of each rank, like the pool
	order    []wantKey                // of wants, as they were made: a map's order differs from run to run
	recv     []device.Ptr             // of each rank: results of eager calls, then of each graph slot
	space    int64                    // of the eager part
	slot     int64                    // of a graph's part
	wrong    [streamSets][]device.Ptr // counters that Compare adds to: one array for each stream, as it has no atomics
	counters []byte
}

// lane is a communicator: a path that was asked for, with a wire.
type lane struct {
	comm       *allreduce.Comm
	path, wire string
}

// streamSets: calls that follow each other on two streams of a device are ordered by the library alone.
const streamSets = 2

const (
	graphSlots = 4

	// The eager part of the memory for results, at least two of the largest reductions; a graph's part is an eighth.
	soakSpace          = 256 << 20
	soakSpaceSimulated = 8 << 20

	// Inputs repeat themselves after so many bytes at the earliest: reductions take theirs from anywhere in there.
	soakPool = 1 << 20

	// Two of three communicators, but not the first, get the smallest ring: above half a ring the copy engines go piece by piece, with streams
	// of their own, and reuse what they sent. 4 MiB would never get there with the default of 8 MiB.
	smallRing = 1 << 20

	// Buffers start up to so many elements past an aligned address.
	maxShift   = 15
	shiftBytes = 64
)

// poolKey names inputs: exact ones have sums that no order and no wire rounds, for NCCL.
type poolKey struct {
	typ   allreduce.Type
	exact bool
}

type pool struct {
	inputs [][]byte     // of each rank
	device []device.Ptr // those of the ranks here, on their devices; nobody writes them
}

// wantKey names what the reductions of a pool must give.
type wantKey struct {
	poolKey
	wire allreduce.Type
	op   allreduce.Op
}

// configureMachine makes the emulated machine: stepped, and with peer access, so that every path can be had.
func (j *soakJob) configureMachine() error {
	if os.Getenv("GGML_CUDA_AR_EMULATED") != "" {
		return nil // the communicator makes the one of the file
	}
	count := j.ranks
	for _, d := range j.devices {
		count = max(count, d+1)
	}
	m := device.DefaultMachine(min(count, device.MaxMachineDevices))
	m.Drive, m.Schedule, m.Seed = device.Stepped, j.schedule, max(j.seed, 1)
	m.Peer = make([][]bool, len(m.Devices))
	for i := range m.Peer {
		m.Peer[i] = slices.Repeat([]bool{true}, len(m.Devices))
		m.Peer[i][i] = false
	}
	return device.ConfigureOnce(m)
}

// openSoak makes everything; the caller closes the rig, also after a failure.
func openSoak(ctx context.Context, driver device.Driver, job *soakJob) (r *soakRig, err error) {
	r = &soakRig{job: job, session: &session{driver: driver, create: createFor(ctx, job.rank)}, pools: map[poolKey]*pool{}, wants: map[wantKey][]device.Ptr{},
		counters: make([]byte, device.CountersBytes)}
	if err := r.openLanes(); err != nil {
		return r, err
	}
	r.comm = r.lanes[0].comm
	r.ranks, r.devices = r.lanes[0].comm.LocalRanks(), r.lanes[0].comm.Devices()
	for set := range streamSets {
		for _, dev := range r.devices {
			stream, err := driver.NewStream(dev)
			if err != nil {
				return r, err
			}
			r.later(func() { _ = driver.DestroyStream(dev, stream) })
			events, err := r.newEvents(dev, 2)
			if err != nil {
				return r, err
			}
			r.streams[set] = append(r.streams[set], stream)
			if set == 0 {
				r.session.streams = append(r.session.streams, stream)
			}
			r.events[set], r.captured[set] = append(r.events[set], events[0]), append(r.captured[set], events[1])
		}
	}
	return r, r.allocate()
}

// openLanes makes a communicator for each path and wire. A path that nobody named may be missing.
func (r *soakRig) openLanes() error {
	ownRing := os.Getenv("GGML_CUDA_AR_RING_BYTES") == "" && os.Getenv("GGML_CUDA_AR_COPY_CHUNK_BYTES") == ""
	for _, path := range r.job.paths {
		for _, wire := range r.job.wires {
			config := allreduce.Config{Ranks: r.job.ranks, Devices: r.job.devices, Algorithm: algorithmOf[path], Wire: wireOf[wire]}
			if ownRing && len(r.lanes)%3 != 0 {
				config.RingBytes = smallRing
			}
			if path == "peer" && r.simulated() {
				config.P2P = allreduce.P2PTrust // nothing proves peer access between emulated devices
			}
			comm, err := r.newComm(config)
			missing := errors.Is(err, allreduce.ErrUnsupported) || errors.Is(err, allreduce.ErrNCCL) || errors.Is(err, allreduce.ErrSetting)
			if missing && r.job.anyPath && path != "auto" {
				r.skipped = append(r.skipped, soakSkipped{path, strings.TrimPrefix(oneLine(err), "New: ")})
				break
			}
			if err != nil {
				return err
			}
			r.lanes = append(r.lanes, lane{comm, path, wire})
		}
	}
	return nil
}

// soakStride is the distance of the windows of one payload.
func soakStride(payload int64) int64 { return windowBytes(payload + shiftBytes) }

func (r *soakRig) allocate() error {
	largest := soakStride(r.job.most)
	share := int64(soakSpace)
	if r.simulated() {
		share = soakSpaceSimulated
	}
	r.space, r.slot = max(share, 2*largest), max(share/8, largest)
	r.poolSize = max(soakPool, 2*largest)
	for set := range streamSets {
		for _, dev := range r.devices {
			if set == 0 {
				p, err := r.malloc(dev, r.space+graphSlots*r.slot)
				if err != nil {
					return err
				}
				r.recv = append(r.recv, p)
			}
			p, err := r.malloc(dev, device.CountersBytes)
			if err != nil {
				return err
			}
			r.wrong[set] = append(r.wrong[set], p)
		}
	}
	for rank, dev := range r.devices {
		for set := range streamSets {
			if err := r.driver.FillAsync(dev, r.wrong[set][rank], 0, device.CountersBytes, r.streams[set][rank]); err != nil {
				return err
			}
		}
	}
	if err := r.synchronize(); err != nil {
		return err
	}
	return r.expectAll()
}

// expectAll prepares the expected results of every route that the job can take, and launches the comparison once for each
// type: a first launch while a reduction's kernel waits for its peer could wait for it.
func (r *soakRig) expectAll() error {
	for _, lane := range r.lanes {
		for _, typ := range r.job.types {
			for _, payload := range r.borders(lane.comm, typ) {
				for _, op := range []allreduce.Op{allreduce.Sum, allreduce.Avg} {
					if _, err := r.want(r.keyOf(lane.comm.Route(payload, typ, op), typ, op)); err != nil {
						return err
					}
				}
			}
		}
	}
	for _, key := range r.order {
		for rank, dev := range r.devices {
			want := r.wants[key][rank]
			rows := device.Rows{Got: want, Want: want, Rows: 1, Count: 1, Type: int32(key.typ)}
			if err := r.driver.Compare(dev, rows, r.wrong[0][rank], r.streams[0][rank]); err != nil {
				return err
			}
		}
	}
	return r.synchronize()
}

// borders lists one payload for each route a lane can take.
func (r *soakRig) borders(comm *allreduce.Comm, typ allreduce.Type) []int64 {
	if r.job.sizes != nil {
		return r.job.sizes
	}
	list := []int64{r.job.least}
	for _, routes := range comm.Stats().Routes {
		for _, band := range routes.Bands {
			if routes.Type == typ && band.MaxBytes >= r.job.least && band.MaxBytes < r.job.most {
				list = append(list, band.MaxBytes+1)
			}
		}
	}
	return list
}

// keyOf says which expected results a route's reductions have.
func (r *soakRig) keyOf(route allreduce.Route, typ allreduce.Type, op allreduce.Op) wantKey {
	wire := route.Wire
	if wire == allreduce.TypeNone {
		wire = typ
	}
	return wantKey{poolKey{typ, route.Path == allreduce.PathNCCL}, wire, op}
}

// want gives the expected results of each rank's device, made when they are first asked for.
func (r *soakRig) want(key wantKey) ([]device.Ptr, error) {
	if list := r.wants[key]; list != nil {
		return list, nil
	}
	p, err := r.pool(key.poolKey)
	if err != nil {
		return nil, err
	}
	bytes, err := reference.Reduction{Type: reference.Type(key.typ), Wire: reference.Type(key.wire), Op: reference.Op(key.op),
		Inputs: p.inputs}.Result()
	if err != nil {
		return nil, err
	}
	var list []device.Ptr
	for _, dev := range r.devices {
		ptr, err := r.upload(dev, bytes)
		if err != nil {
			return nil, err
		}
		list = append(list, ptr)
	}
	r.wants[key], r.order = list, append(r.order, key)
	return list, nil
}

func (r *soakRig) pool(key poolKey) (*pool, error) {
	if p := r.pools[key]; p != nil {
		return p, nil
	}
	p := &pool{}
	for rank := range r.job.ranks {
		input := make([]byte, r.poolSize)
		r.fill(input, key, rank)
		p.inputs = append(p.inputs, input)
	}
	for local, dev := range r.devices {
		ptr, err := r.upload(dev, p.inputs[r.ranks[local]])
		if err != nil {
			return nil, err
		}
		p.device = append(p.device, ptr)
	}
	r.pools[key] = p
	return p, nil
}

// fill makes a rank's inputs: of eight pieces one is special values and one small integers, the rest normal.
func (r *soakRig) fill(to []byte, key poolKey, rank int) {
	const piece = 64 << 10
	for i := 0; i*piece < len(to); i++ {
		kind := reference.Normal
		switch {
		case key.exact || i%8 == 3:
			kind = reference.Integers
		case i%8 == 6:
			kind = reference.Specials
		}
		part := to[i*piece : min((i+1)*piece, len(to))]
		reference.Fill(part, kind, reference.Type(key.typ), r.job.seed*1_000_003+uint64(i), rank)
	}
}

func (r *soakRig) upload(dev int, bytes []byte) (device.Ptr, error) {
	p, err := r.malloc(dev, int64(len(bytes)))
	if err == nil {
		err = r.driver.CopyToDevice(dev, p, bytes)
	}
	if err == nil {
		err = r.driver.SynchronizeDevice(dev) // a copy from pageable memory may return before its last bytes are there
	}
	return p, err
}

// rewrite writes inputs and expected results over themselves; nothing is in flight. The hazard checker remembers every
// range that was read since the last write: at random offsets these become a gigabyte of small pieces within a day.
func (r *soakRig) rewrite() error {
	var lists [][]device.Ptr
	for _, key := range r.order {
		lists = append(lists, r.wants[key])
		if inputs := r.pools[key.poolKey].device; !slices.ContainsFunc(lists, func(l []device.Ptr) bool { return l[0] == inputs[0] }) {
			lists = append(lists, inputs)
		}
	}
	bytes := make([]byte, r.poolSize)
	for _, list := range lists {
		for rank, dev := range r.devices {
			if err := r.driver.CopyToHost(dev, bytes, list[rank]); err != nil {
				return err
			}
			if err := r.driver.CopyToDevice(dev, list[rank], bytes); err != nil {
				return err
			}
		}
	}
	return nil
}

// synchronize waits for every stream; where a communicator has failed, that is the error.
func (r *soakRig) synchronize() error {
	var failure error
	for set := range streamSets {
		for rank, dev := range r.devices {
			if err := r.driver.Synchronize(dev, r.streams[set][rank]); err != nil && failure == nil {
				failure = err
			}
		}
	}
	for _, lane := range r.lanes {
		if err := lane.comm.Err(); err != nil {
			return fmt.Errorf("path %s, wire %s: %w", lane.path, lane.wire, err)
		}
	}
	return failure
}

// fork makes all other streams wait for the first one; join is the way back. Inside a capture on the first stream this
// takes the others into it.
func (r *soakRig) fork(event device.Event) error {
	if err := r.driver.Record(r.devices[0], event, r.streams[0][0]); err != nil {
		return err
	}
	return r.others(func(set, rank, dev int) error { return r.driver.WaitEvent(dev, r.streams[set][rank], event) })
}

func (r *soakRig) join(events *[streamSets][]device.Event) error {
	return r.others(func(set, rank, dev int) error {
		if err := r.driver.Record(dev, events[set][rank], r.streams[set][rank]); err != nil {
			return err
		}
		return r.driver.WaitEvent(r.devices[0], r.streams[0][0], events[set][rank])
	})
}

func (r *soakRig) others(do func(set, rank, dev int) error) error {
	for set := range streamSets {
		for rank, dev := range r.devices {
			if set == 0 && rank == 0 {
				continue
			}
			if err := do(set, rank, dev); err != nil {
				return err
			}
		}
	}
	return nil
}
