"""The cluster in virtual time: the live policies, modelled instances, recorded or published denoising."""
