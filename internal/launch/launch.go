// Package launch reads what launchers of many processes put into the environment: torchrun, Open MPI's mpirun (and any PMIx
// launcher) and Slurm's srun.
package launch

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Info is this process's place in a job. LocalRank and LocalWorld count the processes on this host; -1 and 0 where the
// launcher does not say.
type Info struct {
	Rank, World           int
	LocalRank, LocalWorld int
	// Job tells this job from others of the same user on this host: what the launcher gives that is equal on all its
	// processes and different between jobs.
	Job string
	// By names the launcher whose variables were used.
	By string
}

// launcher is where one launcher says what. The job is all of its names that are set.
type launcher struct {
	name                               string
	rank, world, localRank, localWorld string
	marker                             string // counts only where this is set: srun's steps, not sbatch's script
	job                                []string
}

var launchers = []launcher{
	{name: "torchrun", rank: "RANK", world: "WORLD_SIZE", localRank: "LOCAL_RANK", localWorld: "LOCAL_WORLD_SIZE",
		job: []string{"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}},
	{name: "mpirun", rank: "OMPI_COMM_WORLD_RANK", world: "OMPI_COMM_WORLD_SIZE", localRank: "OMPI_COMM_WORLD_LOCAL_RANK",
		localWorld: "OMPI_COMM_WORLD_LOCAL_SIZE", job: []string{"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
	{name: "srun", rank: "SLURM_PROCID", world: "SLURM_STEP_NUM_TASKS", localRank: "SLURM_LOCALID", marker: "SLURM_STEP_NUM_TASKS",
		job: []string{"SLURM_JOB_ID", "SLURM_STEP_ID"}},
	// PMIx alone gives no world size: the programs that need one ask its library. Rank and namespace are checked.
	{name: "PMIx", rank: "PMIX_RANK", job: []string{"PMIX_NAMESPACE"}},
}

// value is a number and the variable it came from.
type value struct {
	n    int
	from string
}

// FromEnviron reads environ ("NAME=value"). found is false where no launcher has set a rank and a number of ranks. Two
// variables that contradict each other, or a value that is no such number, are an error that names them.
func FromEnviron(environ []string) (info Info, found bool, err error) {
	env := make(map[string]string)
	for _, entry := range environ {
		if name, v, ok := strings.Cut(entry, "="); ok && v != "" {
			if _, twice := env[name]; !twice {
				env[name] = v
			}
		}
	}
	r := reader{env: env}
	var rank, world, localRank, localWorld *value
	var jobs []string
	for _, l := range launchers {
		if l.marker != "" && env[l.marker] == "" || env[l.rank] == "" {
			continue
		}
		rank = r.agree(rank, l.rank)
		world = r.agree(world, l.world)
		localRank = r.agree(localRank, l.localRank)
		localWorld = r.agree(localWorld, l.localWorld)
		for _, name := range l.job {
			if v := env[name]; v != "" && !slices.Contains(jobs, name+"="+v) {
				jobs = append(jobs, name+"="+v)
			}
		}
		info.By = cmp.Or(info.By, l.name)
	}
	switch {
	case r.err != nil:
		return Info{}, false, r.err
	case rank == nil || world == nil:
		if rank != nil && rank.from == "RANK" {
			return Info{}, false, fmt.Errorf("%s=%d is set and WORLD_SIZE is not", rank.from, rank.n)
		}
		return Info{}, false, nil
	}
	info.Rank, info.World, info.LocalRank, info.Job = rank.n, world.n, -1, strings.Join(jobs, " ")
	if world.n < 1 || rank.n >= world.n {
		return Info{}, false, fmt.Errorf("%s=%d is not below %s=%d", rank.from, rank.n, world.from, world.n)
	}
	if localWorld != nil {
		info.LocalWorld = localWorld.n
		if localWorld.n < 1 || localWorld.n > world.n {
			return Info{}, false, fmt.Errorf("%s=%d does not fit %s=%d", localWorld.from, localWorld.n, world.from, world.n)
		}
	}
	if localRank != nil {
		info.LocalRank = localRank.n
		if localWorld != nil && localRank.n >= localWorld.n {
			return Info{}, false, fmt.Errorf("%s=%d is not below %s=%d", localRank.from, localRank.n, localWorld.from, localWorld.n)
		}
		if localRank.n > rank.n {
			return Info{}, false, fmt.Errorf("%s=%d is above %s=%d", localRank.from, localRank.n, rank.from, rank.n)
		}
	}
	return info, true, nil
}

type reader struct {
	env map[string]string
	err error
}

// agree reads a variable and holds it against what another launcher said.
func (r *reader) agree(known *value, name string) *value {
	text := r.env[name]
	if text == "" || r.err != nil {
		return known
	}
	n, err := strconv.ParseUint(text, 10, 31)
	if err != nil {
		r.err = fmt.Errorf("%s=%.40q is not allowed; allowed: whole numbers from 0 on", name, text)
		return known
	}
	if known != nil && known.n != int(n) {
		r.err = fmt.Errorf("%s=%d contradicts %s=%d", name, n, known.from, known.n)
	}
	if known != nil {
		return known
	}
	return &value{int(n), name}
}

// Variables lists every variable that is looked at, sorted.
func Variables() []string {
	set := make(map[string]bool)
	for _, l := range launchers {
		for _, name := range append([]string{l.rank, l.world, l.localRank, l.localWorld}, l.job...) {
			if name != "" {
				set[name] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(set))
}
