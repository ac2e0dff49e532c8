"""Starts, watches and stops the training processes of one host.

daemon.py is the agent. It starts a shim (shim.py) for each job, which runs the job's processes by a supervisor
(supervisor.py); a launcher uses the same supervisor for its own processes. gate.py is the first thing that a training
process runs, processes.py the process as its parent sees it, output.py what it prints, cores_and_gpus.py which GPU it
sees, and guardian.py the helper process that ends training processes when their parent is killed.
"""
