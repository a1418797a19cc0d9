package allreduce

import "gpu.example/allreduce/internal/core"

// Stats is what a communicator did and holds, at the moment of the call. It is the caller's to keep.
type Stats struct {
	// Paths counts the reductions by path: Stats.Paths[PathInternal].
	Paths [numPaths]PathStats
	// Ranks tells the memory each local rank holds.
	Ranks []RankStats
	// Routes are the routing tables of the types served here, contiguous payloads, with the substitutes of paths that
	// failed in their place.
	Routes []TypeRoutes
	// Allocations counts how often the library allocated memory lazily (not in New or Prepare).
	Allocations uint64
	// CopyChunkBytes is the size of one copy on the wire in the last copy-engine reduction; 0 before the first.
	CopyChunkBytes int64
	// NCCLVersion is the version code of the NCCL that was opened, 23007 for 2.30.7; 0 without one.
	NCCLVersion int
	// Warnings lists what New found odd and which paths were given up since, each once, oldest first.
	Warnings []string
}

// PathStats counts the reductions that took one path. A captured reduction counts once, at capture.
type PathStats struct {
	Calls uint64
	Bytes uint64 // payload per rank, all calls together
}

// RankStats is the memory the library holds for one rank, in bytes, by path.
type RankStats struct {
	Rank        int
	Device      int
	DeviceBytes [numPaths]int64
	PinnedBytes [numPaths]int64
}

// TypeRoutes is the routing table of one element type.
type TypeRoutes struct {
	Type  Type
	Bands []Band // ascending by MaxBytes
}

// Stats tells what the communicator did and holds. Safe for concurrent use; after Close no memory is held any more.
func (c *Comm) Stats() Stats {
	if c == nil || c.core == nil {
		return Stats{}
	}
	s := c.coreStats()
	out := Stats{Allocations: s.Allocations, CopyChunkBytes: int64(s.ChunkBytes), NCCLVersion: s.NCCLVersion}
	for p := range out.Paths {
		out.Paths[p] = PathStats{Calls: s.Calls[p], Bytes: s.Bytes[p]}
	}
	for _, r := range s.Ranks {
		out.Ranks = append(out.Ranks, RankStats(r))
	}
	for typ := range Type(numTypes) {
		if bands := c.bandsNow(typ); bands != nil {
			out.Routes = append(out.Routes, TypeRoutes{typ, bands})
		}
	}
	c.warnings.Lock()
	out.Warnings = append(out.Warnings, c.warnings.list...)
	c.warnings.Unlock()
	return out
}

// bandsNow gives the contiguous bands of a type with failed paths replaced; nil where nothing but "no elements" serves.
func (c *Comm) bandsNow(typ Type) []Band {
	var bands []Band
	served := false
	for _, b := range c.table.bands[typ][0] {
		if b.err != nil {
			continue
		}
		now, err := c.skipFailed(&b, failureKey(typ, false))
		if err != nil {
			continue
		}
		most := b.MaxBytes
		b = *now
		b.MaxBytes = most
		served = served || most > 0
		bands = append(bands, b)
	}
	if !served {
		return nil
	}
	return bands
}

// memoryOf adds up what all ranks hold for one path.
func memoryOf(s core.Stats, p Path) (device, pinned int64) {
	for _, r := range s.Ranks {
		device += r.DeviceBytes[p]
		pinned += r.PinnedBytes[p]
	}
	return device, pinned
}
