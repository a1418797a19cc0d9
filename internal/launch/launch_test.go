package launch

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFromEnviron(t *testing.T) {
	torchrun := []string{"RANK=3", "WORLD_SIZE=8", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=node0", "MASTER_PORT=29500", "TORCHELASTIC_RUN_ID=none"}
	mpirun := []string{"OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_LOCAL_RANK=1", "OMPI_COMM_WORLD_LOCAL_SIZE=2", "PMIX_RANK=1", "PMIX_NAMESPACE=prterun-host-77@1"}
	srun := []string{"SLURM_PROCID=5", "SLURM_STEP_NUM_TASKS=8", "SLURM_NTASKS=8", "SLURM_LOCALID=1", "SLURM_JOB_ID=42", "SLURM_STEP_ID=0"}
	for _, c := range []struct {
		name  string
		env   []string
		want  Info
		found bool
		err   string
	}{
		{name: "nothing", env: []string{"HOME=/root", "MASTER_PORT=1"}},
		{name: "torchrun", env: torchrun, found: true, want: Info{3, 8, 1, 2, "MASTER_ADDR=node0 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none", "torchrun"}},
		{name: "mpirun", env: mpirun, found: true, want: Info{1, 2, 1, 2, "PMIX_NAMESPACE=prterun-host-77@1", "mpirun"}},
		{name: "srun", env: srun, found: true, want: Info{5, 8, 1, 0, "SLURM_JOB_ID=42 SLURM_STEP_ID=0", "srun"}},
		{name: "the script of sbatch", env: []string{"SLURM_PROCID=0", "SLURM_NTASKS=8", "SLURM_JOB_ID=42"}},
		{name: "a shell of salloc", env: []string{"SLURM_NTASKS=8", "SLURM_JOB_ID=42"}},
		{name: "PMIx alone", env: []string{"PMIX_RANK=1", "PMIX_NAMESPACE=x"}},
		{name: "PMIx under another launcher", env: []string{"RANK=1", "WORLD_SIZE=2", "PMIX_RANK=1", "PMIX_NAMESPACE=x"}, found: true,
			want: Info{1, 2, -1, 0, "PMIX_NAMESPACE=x", "torchrun"}},
		{name: "torch's variables set by srun's script", env: append([]string{"RANK=5", "WORLD_SIZE=8", "LOCAL_RANK=1"}, srun...), found: true,
			want: Info{5, 8, 1, 0, "SLURM_JOB_ID=42 SLURM_STEP_ID=0", "torchrun"}},
		{name: "one rank", env: []string{"RANK=0", "WORLD_SIZE=1"}, found: true, want: Info{0, 1, -1, 0, "", "torchrun"}},
		{name: "an empty value is not set", env: []string{"RANK=", "WORLD_SIZE=2"}},

		{name: "two launchers", env: append([]string{"RANK=0", "WORLD_SIZE=2"}, mpirun...), err: "OMPI_COMM_WORLD_RANK=1 contradicts RANK=0"},
		{name: "two worlds", env: append([]string{"RANK=1", "WORLD_SIZE=4"}, mpirun...), err: "OMPI_COMM_WORLD_SIZE=2 contradicts WORLD_SIZE=4"},
		{name: "PMIx", env: []string{"RANK=1", "WORLD_SIZE=2", "PMIX_RANK=0"}, err: "PMIX_RANK=0 contradicts RANK=1"},
		{name: "rank beyond", env: []string{"RANK=2", "WORLD_SIZE=2"}, err: "RANK=2 is not below WORLD_SIZE=2"},
		{name: "empty world", env: []string{"RANK=0", "WORLD_SIZE=0"}, err: "RANK=0 is not below WORLD_SIZE=0"},
		{name: "local beyond", env: []string{"RANK=1", "WORLD_SIZE=4", "LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"}, err: "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"},
		{name: "local above rank", env: []string{"RANK=1", "WORLD_SIZE=4", "LOCAL_RANK=2"}, err: "LOCAL_RANK=2 is above RANK=1"},
		{name: "local world beyond", env: []string{"RANK=1", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=4"}, err: "LOCAL_WORLD_SIZE=4 does not fit WORLD_SIZE=2"},
		{name: "no number", env: []string{"RANK=one", "WORLD_SIZE=2"}, err: `RANK="one" is not allowed; allowed: whole numbers from 0 on`},
		{name: "negative", env: []string{"RANK=-1", "WORLD_SIZE=2"}, err: `RANK="-1" is not allowed; allowed: whole numbers from 0 on`},
		{name: "no world", env: []string{"RANK=1"}, err: "RANK=1 is set and WORLD_SIZE is not"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, found, err := FromEnviron(c.env)
			if c.err != "" {
				require.EqualError(t, err, c.err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.found, found)
			if found {
				require.Equal(t, c.want, got)
			}
		})
	}
	require.Contains(t, Variables(), "LOCAL_RANK")
}
