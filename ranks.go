package allreduce

import (
	"fmt"
	"os"

	"gpu.example/allreduce/internal/launch"
)

// Rank is this process's place among the processes that reduce together, one rank each. The zero Rank is what the launcher
// says: see LaunchedRank.
type Rank struct {
	// Rank is this process's number, from 0 to World-1.
	Rank, World int
	// LocalRank counts the processes of this host from 0. It is the device of this rank unless Config.Devices names one;
	// where the process sees a single device, it is that one. -1: not known, then it is Rank.
	LocalRank int
	// LocalWorld is the number of ranks on this host; 0: not known.
	LocalWorld int
	// Job tells this job from others of the same user on the same host; Config.Rendezvous wins over it. Ranks of one job
	// give the same.
	Job string
}

// LaunchedRank reads the place that a launcher gave this process: the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK,
// LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), of Open MPI's mpirun (OMPI_COMM_WORLD_*, PMIX_*) and of Slurm's srun
// (SLURM_*). launched is false where there are none. Variables that contradict each other are ErrSetting.
func LaunchedRank() (rank Rank, launched bool, err error) {
	info, found, err := launch.FromEnviron(os.Environ())
	if err != nil {
		return Rank{}, false, newError("LaunchedRank", ErrSetting, "%s", err)
	}
	if !found {
		return Rank{}, false, nil
	}
	return Rank{Rank: info.Rank, World: info.World, LocalRank: info.LocalRank, LocalWorld: info.LocalWorld, Job: info.Job}, true, nil
}

// resolve fills in what the launcher says for the zero Rank, and checks the rest.
func (r Rank) resolve() (Rank, error) {
	if r == (Rank{}) {
		launched, found, err := LaunchedRank()
		if err != nil {
			return r, err
		}
		if !found {
			return r, newError("", ErrSetting, "this process was not started by torchrun, mpirun or srun (none of their variables is set): give Join a Rank")
		}
		r = launched
	}
	switch {
	case r.World < 1 || r.World > maxRanks:
		return r, newError("", ErrArgument, "Rank.World is %d; allowed: 1 to %d", r.World, maxRanks)
	case r.Rank < 0 || r.Rank >= r.World:
		return r, newError("", ErrArgument, "Rank.Rank is %d; allowed: 0 to %d", r.Rank, r.World-1)
	case r.LocalWorld < 0 || r.LocalWorld > r.World:
		return r, newError("", ErrArgument, "Rank.LocalWorld is %d; allowed: 0 to %d", r.LocalWorld, r.World)
	case r.LocalRank < -1 || r.LocalRank >= r.World || r.LocalWorld > 0 && r.LocalRank >= r.LocalWorld:
		return r, newError("", ErrArgument, "Rank.LocalRank is %d of %d; allowed: -1, or 0 and up below the number of ranks on the host", r.LocalRank, max(r.LocalWorld, r.World))
	}
	if r.LocalRank < 0 {
		r.LocalRank = r.Rank
	}
	return r, nil
}

// chooseDevice gives the device of a rank that has a process of its own.
func (r Rank) chooseDevice(s *settings, backend Backend, count int) (int32, error) {
	if s.ranks != 0 && s.ranks != r.World {
		return 0, newError("", ErrSetting, "Config.Ranks is %d, the job has %d ranks; allowed: 0 or %d", s.ranks, r.World, r.World)
	}
	if s.devices != nil && len(s.devices) != 1 {
		return 0, newError("", ErrSetting, "Config.Devices names %d devices; allowed with Join: nil or one", len(s.devices))
	}
	ordinal, why := r.LocalRank, fmt.Sprintf("local rank %d", r.LocalRank)
	switch {
	case s.devices != nil:
		ordinal, why = s.devices[0], "Config.Devices"
	case count == 1: // the launcher shows each process its own
		ordinal = 0
	}
	if ordinal >= count {
		err := newError("", ErrNoDevice, "there is no device %d for %s: this process sees %d (%s)", ordinal, why, count, backend)
		err.Rank, err.Device = r.Rank, ordinal
		return 0, err
	}
	return int32(ordinal), nil
}
